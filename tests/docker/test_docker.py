"""The images' files are well formed, and what they copy, install and start exists. The images themselves are not built here."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKER = REPOSITORY / "docker"
FILES = sorted(DOCKER.glob("Dockerfile*"))
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "WORKDIR", "RUN", "COPY", "ENTRYPOINT", "CMD"}


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} belongs to the test extra of pyproject.toml"
    return found


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path):
    # DL3007: the vendor tags only `latest` below a release; DL3008, DL3013: what requirements.txt already pins, Debian's ssh
    command = [tool("hadolint"), "--ignore", "DL3007", "--ignore", "DL3008", "--ignore", "DL3013", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_dockerfile_copies_and_starts_exists(path):
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    for name, rest in found:
        if name == "COPY":
            for source in shlex.split(rest)[:-1]:
                assert (REPOSITORY / source).exists(), source
    command = next(yaml.safe_load(rest) for name, rest in found if name == "CMD")
    assert (REPOSITORY / command[0]).is_file()
    packages = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    copied = {source for name, rest in found if name == "COPY" for source in shlex.split(rest)[:-1]}
    assert {"conf", "modeling", "recipes", "scripts", "README.md"} <= copied and 'readme = "README.md"' in packages


def test_the_gaudi_image_is_a_pair_of_the_compatibility_table_and_keeps_its_torch():
    from recipes.pipeline.compatibility import VALIDATED_GAUDI, torch_of

    arguments = dict(
        rest.split("=") for name, rest in instructions(DOCKER / "Dockerfile") if name == "ARG" and "=" in rest
    )
    assert arguments["GAUDI"].startswith(VALIDATED_GAUDI)
    assert ".".join(arguments["TORCH"].split(".")[:2]) == torch_of(arguments["GAUDI"])
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert "pip install torch" not in text and "diff /tmp/torch.before /tmp/torch.after" in text
    for gaudi, torch in re.findall(r"GAUDI=(1\.2\d\.\d) --build-arg TORCH=(2\.\d+)\.\d", text):
        assert torch == torch_of(gaudi)


def test_compose_names_both_images_and_the_vendors_runtime():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for service in services.values():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve().is_file()
        for volume in service["volumes"]:
            assert ":" in volume
    gaudi = services["gaudi"]
    assert gaudi["runtime"] == "habana" and gaudi["environment"]["HABANA_VISIBLE_DEVICES"] == "all"


def test_what_the_headers_start_is_understood(tmp_path, warm):
    for path in DOCKER.iterdir():
        for line in re.findall(
            r"run --rm \S+ (\S+\.py.*?)(?:\s{2,}.*)?$", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            words = shlex.split(line)
            script = REPOSITORY / words[0]
            check = ["--dry_run", *words[1:]] if script.name == "gaudi_spawn.py" else [*words[1:], "dry_run=true"]
            if "gaudi_spawn" in line:
                check[check.index("recipes/lora.py")] = str(REPOSITORY / "recipes/lora.py")
            done = warm(script, *check, cwd=tmp_path)
            assert done.returncode == 0, f"{line}: {done.stderr}"
