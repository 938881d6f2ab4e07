"""Which versions of Gaudi's software belong together, and a warning where these do not. Nothing here imports torch."""

from __future__ import annotations

from importlib import metadata

# Gaudi software release -> torch that its image ships (docs.habana.ai, names of the pytorch-installer images)
TORCH_OF_GAUDI = {"1.21": ("2.6",), "1.22": ("2.7",), "1.23": ("2.9",), "1.24": ("2.10", "2.11")}
# optimum-habana 1.21.2: validated with Gaudi 1.24, transformers 4.55, accelerate up to 1.10.1 (its metadata)
VALIDATED_GAUDI = "1.24"


def gaudi_warnings() -> list[str]:
    """One line for each installed version that does not belong with the others. Empty where no Gaudi software is."""
    if (release := _version("habana-torch-plugin")) is None:
        return []
    found, torch = _short(release), _version("torch")
    lines = []
    if found not in TORCH_OF_GAUDI:
        lines.append(
            f"Gaudi software {release} is outside {', '.join(TORCH_OF_GAUDI)}, which this project is written for"
        )
    elif torch is not None and _short(torch) not in TORCH_OF_GAUDI[found]:
        wanted = " or ".join(TORCH_OF_GAUDI[found])
        lines.append(f"torch {torch} with Gaudi software {release}: its image ships torch {wanted}; use the vendor's")
    elif found != VALIDATED_GAUDI:
        lines.append(f"optimum-habana 1.21.2 is validated with Gaudi software {VALIDATED_GAUDI}, this is {release}")
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])
