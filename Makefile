# Each target sets up what it needs; the second time that costs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup train test check bench clean debian

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	touch $(READY)

train: setup
	$(BIN)/troupe train LunarLander-v3

# strace breaks system calls on purpose in the tests of the checkpoints; the tests start RabbitMQ nodes of their own
debian:
	@(command -v strace && command -v openssl && test -x /usr/lib/rabbitmq/bin/rabbitmq-server) >/dev/null \
	|| (apt-get update -qq && apt-get install -y -qq strace openssl rabbitmq-server)

test: setup debian
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy

bench: setup
	bench/peers/setup.sh
	$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) .venv-sb3 .venv-rllib
