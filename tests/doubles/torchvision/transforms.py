"""Empty, see the package."""
