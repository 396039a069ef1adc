# hpc-serve: what there is to run. `make` alone lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
export VENV
# Tests and the cluster need root: they make network namespaces.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo --preserve-env=HPC_SERVE_KEEP_CLUSTER,HPC_SERVE_CLUSTER_ROOT)
PYTHON_AS_ROOT = $(SUDO) env PYTHONDONTWRITEBYTECODE=1 $(VENV)/bin/python
SHELL_SCRIPTS = .ci/run $(wildcard envs/*.sh sbatch/*.sh)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: ## .venv with hpc-serve, vLLM on CPUs, and what tests need
	@envs/venv.sh dev

.PHONY: demo
demo: ## a tiny model, served by real vLLM on this machine, asked and stopped
	@envs/venv.sh
	@$(VENV)/bin/hpc-serve demo

.PHONY: test
test: packages venv check ## everything, on a real Slurm of three hosts; ARGS="-k words" selects
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster $(ARGS)

.PHONY: check
check: packages venv ## ruff, mypy, shellcheck, bash -n
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@shellcheck $(SHELL_SCRIPTS)
	@for script in $(SHELL_SCRIPTS); do bash -n "$$script" || exit; done

.PHONY: cluster
cluster: packages venv ## a Slurm of three hosts on this machine, to play with
	@$(PYTHON_AS_ROOT) -m tests.cluster up

.PHONY: cluster-down
cluster-down: ## take it down; nothing is left
	@$(SUDO) env PYTHONDONTWRITEBYTECODE=1 python3 -m tests.cluster down

.PHONY: lock
lock: ## choose versions anew and write them to envs/*/lock.txt
	@envs/lock.sh

.PHONY: clean
clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: packages
packages:
	@envs/packages.sh python3-venv slurm-wlm munge iproute2 shellcheck
