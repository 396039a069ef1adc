# hpc-serve: what there is to run. `make` alone lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
export VENV
# Tests and the cluster need root: they make network namespaces.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo --preserve-env=HPC_SERVE_KEEP_CLUSTER,HPC_SERVE_CLUSTER_ROOT,HPC_SERVE_BROWSER)
# SLURM=trixie: the cluster's hosts are of that Debian, with its Slurm, in a root of its own (tests/cluster/SLURM_VERSIONS.md).
LATER_DEBIANS = /var/lib/hpc-serve-debian
SLURM_ROOT ?= $(if $(SLURM),$(LATER_DEBIANS)/$(SLURM))
PYTHON_AS_ROOT = $(SUDO) env PYTHONDONTWRITEBYTECODE=1 $(if $(COVERAGE),COVERED_CHECKOUT="$(CURDIR)") \
	$(if $(SLURM_ROOT),HPC_SERVE_CLUSTER_OS="$(SLURM_ROOT)") $(if $(IMAGE),HPC_SERVE_IMAGE_BASE="$(IMAGE)") \
	$(if $(TRANSCRIPTS),HPC_SERVE_TRANSCRIPTS="$(TRANSCRIPTS)") \
	$(if $(REAL_REPLICAS),HPC_SERVE_REAL_REPLICAS=$(REAL_REPLICAS)) $(VENV)/bin/python
# Two processes, each with a cluster: real engines in one, the stub in the other (tests/support/two_processes.py).
TWO_PROCESSES = --numprocesses=2 --dist=loadscope
SHELL_SCRIPTS = .ci/run $(wildcard envs/*.sh examples/*.sh sbatch/*.sh tests/cluster/*.sh)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: ## .venv with hpc-serve, vLLM on CPUs, and what tests need
	@envs/venv.sh dev

.PHONY: demo
demo: ## a tiny model, served by real vLLM on this machine, asked and stopped
	@envs/venv.sh
	@$(VENV)/bin/hpc-serve demo

.PHONY: test
test: packages venv check ## everything, on a real Slurm of three hosts; ARGS="-k words" selects
	@envs/packages.sh iptables
	@$(PYTHON_AS_ROOT) -m tests --require-cluster $(TWO_PROCESSES) $(COVERAGE) $(ARGS)

.PHONY: test-long
test-long: packages venv ## what `make test` thins: the wide sweeps with all cases, and every unit test under each further Python
	@$(VENV)/bin/python -m pytest -p no:cacheprovider --long --numprocesses=2 $(ARGS) tests/unit
	@envs/versions.sh $(VERSIONS)

.PHONY: second-slurm
second-slurm: SLURM = trixie
second-slurm: packages venv ## the cluster's tests with the stub engine on Debian 13's Slurm, by debootstrap (300 MB): about 15 minutes
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster -m "slurm and not engine" tests/cluster tests/e2e $(ARGS)

.PHONY: charliecloud
charliecloud: IMAGE = $(LATER_DEBIANS)/trixie
charliecloud: packages venv ## services in an image (Debian 13), by Charliecloud: the stub engine on two nodes, real vLLM; five minutes
	@envs/packages.sh charliecloud-runtime
	@$(SUDO) tests/cluster/debian_root.sh "$(IMAGE)" trixie
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster tests/e2e/test_container.py -k charliecloud $(ARGS)

.PHONY: apptainer
apptainer: SLURM = sid
apptainer: IMAGE = $(LATER_DEBIANS)/sid
apptainer: packages venv ## the same by Apptainer, from a folder and from a SIF file, on hosts of Debian's unstable branch (700 MB)
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster tests/e2e/test_container.py -k apptainer $(ARGS)

.PHONY: podman-hpc
podman-hpc: SLURM = sid
podman-hpc: IMAGE = $(LATER_DEBIANS)/sid
podman-hpc: packages venv ## the same by podman-hpc (rootless podman), as an ordinary user, on those hosts
	@VENV=.venv-podman-hpc envs/venv.sh podman-hpc
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster tests/e2e/test_container.py -k podman $(ARGS)

.PHONY: pyxis
pyxis: IMAGE = $(LATER_DEBIANS)/trixie
pyxis: SLURM_ROOT = $(LATER_DEBIANS)/pyxis
pyxis: PYXIS ?= https://github.com/NVIDIA/pyxis
pyxis: ENROOT ?= https://github.com/NVIDIA/enroot
pyxis: packages venv ## the same by Pyxis and Enroot, built from their sources (700 MB), on hosts of Debian 13
	@$(SUDO) tests/cluster/debian_root.sh "$(IMAGE)" trixie
	@$(SUDO) tests/cluster/pyxis_root.sh "$(SLURM_ROOT)" "$(IMAGE)" "$(PYXIS)" "$(ENROOT)"
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster tests/e2e/test_container.py -k pyxis $(ARGS)

.PHONY: real-replicas
real-replicas: REAL_REPLICAS = 1
real-replicas: packages venv ## several real vLLM engines in one job, and data-parallel ranks: half an hour, 7 GB of memory
	@$(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider --require-cluster tests/e2e/test_real_replicas_per_job.py \
		tests/e2e/test_real_data_parallel.py $(ARGS)

.PHONY: kinds
kinds: packages venv ## an embedder, a reranker, Whisper and adapters with real vLLM, and the table of kinds: ten minutes and more, no Slurm
	@HPC_SERVE_REAL_KINDS=1 $(VENV)/bin/python -m pytest -p no:cacheprovider tests/e2e/test_real_kinds.py tests/e2e/test_real_kinds_table.py tests/e2e/test_real_adapters.py $(ARGS)

.PHONY: faults
faults: packages venv ## what users get while parts of a service break; ARGS="--only NAME" selects, --short needs no Slurm
	@envs/packages.sh bindfs e2fsprogs gcc libc6-dev
	@$(PYTHON_AS_ROOT) -m tests.faults $(ARGS)

.PHONY: pains
pains: packages venv ## what goes wrong most, brought about on a real Slurm, and what is said of it; ARGS="--only NAME" selects
	@envs/packages.sh bindfs iptables
	@$(PYTHON_AS_ROOT) -m tests.pains $(ARGS)

.PHONY: slow-load
slow-load: packages venv ## time left beside the truth, of real vLLM on a throttled disk; ARGS=--stub without vLLM
	@envs/packages.sh bindfs
	@$(PYTHON_AS_ROOT) -m tests.slow_load $(ARGS)

.PHONY: bench
bench: packages venv ## every benchmark, on a quiet machine; ARGS="--only NAME" selects; writes benchmarks/RESULTS.md
	@envs/packages.sh bindfs strace
	@$(VENV)/bin/python -m benchmarks $(ARGS)

.PHONY: unit
unit: packages venv ## the unit tests alone, of this Python; no root
	@$(VENV)/bin/python -m pytest -p no:cacheprovider $(ARGS) tests/unit

.PHONY: versions
versions: ## unit tests under each further Python of this machine, without an engine, of each its first case; VERSIONS="3.10 3.13" selects
	@envs/versions.sh --first-cases $(VERSIONS)

.PHONY: coverage
coverage: COVERAGE = --cov --cov-config=setup.cfg --cov-report=
coverage: test ## `make test`, which takes half as long again so, and the lines of hpc_serve that it did not reach
	@COVERED_CHECKOUT="$(CURDIR)" $(VENV)/bin/coverage report --show-missing --skip-covered

.PHONY: check
check: packages venv ## ruff (rules and format), the arrows between packages, mypy, shellcheck, bash -n
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet . || { echo 'run `make format`'; exit 1; }
	@$(VENV)/bin/lint-imports --no-cache --no-logo
	@$(VENV)/bin/mypy
	@shellcheck $(SHELL_SCRIPTS)
	@for script in $(SHELL_SCRIPTS); do bash -n "$$script" || exit; done

.PHONY: format
format: venv ## ruff writes the code as it is to look
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

.PHONY: docs
docs: ## the documentation site in site/, without a dead link or a page that the menu lacks
	@VENV=.venv-docs envs/venv.sh docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.PHONY: docs-look
docs-look: docs ## the site in Chromium: 400, 800, 1,400 px, light and dark, links, search; ARGS="--pictures FOLDER" keeps pictures
	@envs/packages.sh chromium
	@VENV=.venv-browser envs/venv.sh browser
	@.venv-browser/bin/python envs/browser/look.py site $(ARGS)

.PHONY: page-look
page-look: packages venv ## the gateway's page in Chromium, light and dark, 400 and 1,000 px, with a stub engine; ARGS="--pictures FOLDER" keeps pictures
	@envs/packages.sh chromium
	@VENV=.venv-browser envs/venv.sh browser
	@$(VENV)/bin/python -m tests.page_look .venv-browser/bin/python $(ARGS)

.PHONY: page-through-ssh
page-through-ssh: packages venv ## that page on another host, through ssh, with real vLLM, across a handover: ten minutes
	@envs/packages.sh chromium openssh-server
	@VENV=.venv-browser envs/venv.sh browser
	@HPC_SERVE_BROWSER="$(CURDIR)/.venv-browser/bin/python" $(PYTHON_AS_ROOT) -m pytest -p no:cacheprovider \
		--require-cluster tests/e2e/test_page_through_ssh.py $(ARGS)

.PHONY: samples
samples: packages venv ## the printed samples of the documents and the recording, anew: real vLLM on the test cluster, four minutes
	@$(PYTHON_AS_ROOT) -m tests.samples --cluster

.PHONY: scripts
scripts: venv ## render sbatch/*.sh anew, each by the command in its first lines
	@for script in sbatch/*.sh; do \
		words=$$(sed -n 's/^# Rendered by [^:]*: hpc-serve //p' "$$script"); \
		text=$$(HOME=/nonexistent $(VENV)/bin/hpc-serve $$words) || exit; \
		echo "$$text" > "$$script"; \
	done

.PHONY: cluster
cluster: packages venv ## a Slurm of three hosts on this machine, to play with
	@$(PYTHON_AS_ROOT) -m tests.cluster up

.PHONY: cluster-down
cluster-down: ## take it down; nothing is left
	@$(SUDO) env PYTHONDONTWRITEBYTECODE=1 python3 -m tests.cluster down

.PHONY: lock
lock: ## write envs/*/lock.txt: what is new is added; ARGS=--upgrade chooses all versions anew
	@envs/lock.sh $(ARGS)

.PHONY: licences
licences: venv ## the licence of every package that is locked
	@$(VENV)/bin/python envs/licences.py

.PHONY: clean
clean: ## remove .venv and what was built
	rm -rf $(VENV) .venv-* site build dist .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: packages
packages:
	@envs/packages.sh python3-venv slurm-wlm munge iproute2 shellcheck
	@$(if $(SLURM),$(SUDO) tests/cluster/debian_root.sh "$(SLURM_ROOT)" "$(SLURM)")
