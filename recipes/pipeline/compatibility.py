"""Which versions of Gaudi's software belong together, and a warning where these do not. Nothing here imports torch."""

from __future__ import annotations

from importlib import metadata

# Gaudi software release -> torch that its image ships (docs.habana.ai, names of the pytorch-installer images)
TORCH_OF_GAUDI = {"1.21": "2.6", "1.22": "2.7", "1.23": "2.9", "1.24.0": "2.10", "1.24.1": "2.11"}
# optimum-habana 1.21.2: validated with Gaudi 1.24, transformers 4.55, accelerate up to 1.10.1 (its metadata)
VALIDATED_GAUDI = "1.24"


def gaudi_warnings() -> list[str]:
    """One line for each installed version that does not belong with the others. Empty where no Gaudi software is."""
    if (release := _version("habana-torch-plugin")) is None:
        return []
    wanted, torch = torch_of(release), _version("torch")
    lines = []
    if wanted is None:
        lines.append(
            f"Gaudi software {release} is outside {', '.join(TORCH_OF_GAUDI)}, which this project is written for"
        )
    elif torch is not None and _first(2, torch) != wanted:
        lines.append(f"torch {torch} with Gaudi software {release}: its image ships torch {wanted}; use the vendor's")
    elif _first(2, release) != VALIDATED_GAUDI:
        lines.append(f"optimum-habana 1.21.2 is validated with Gaudi software {VALIDATED_GAUDI}, this is {release}")
    return lines


def torch_of(release: str) -> str | None:
    """Torch in the image of a Gaudi release (1.24.0.585); None for a release that is not in the table."""
    return TORCH_OF_GAUDI.get(_first(3, release)) or TORCH_OF_GAUDI.get(_first(2, release))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first(parts: int, version: str) -> str:
    return ".".join(version.split(".")[:parts])
