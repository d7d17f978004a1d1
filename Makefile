PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests/unit
DEMO_OUT ?= demo_out
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
INSTALLED := $(VENV)/.installed

.PHONY: help demo test test-speed test-comfy lint clean

help:
	@echo "make demo   run the bundled miniature and write its pictures to $(DEMO_OUT)/"
	@echo "make test   run the tests, JOBS at once (2)"
	@echo "make test-speed   time the transformer beside diffusers' (nothing may be much slower)"
	@echo "make test-comfy   run the tests in a real ComfyUI; see COMFYUI_PYTHON and COMFYUI_PATH in tests/comfy"
	@echo "make lint   check the style"
	@echo "make clean  remove $(VENV) and $(DEMO_OUT)"
	@echo "Each sets up $(VENV) by itself; PYTHON=... chooses the interpreter (3.10 or newer)."

# torch first, by its pin: what follows then finds it there and draws in no other build.
$(INSTALLED): requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; choose one: make PYTHON=python3.11" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' requirements-dev.txt)"
	$(PIP) -r requirements-dev.txt
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m qwen21 demo --out $(DEMO_OUT)

# Not `python -m pytest`: that puts this folder on sys.path, where nodes/ would shadow the nodes.py of ComfyUI.
test: $(INSTALLED)
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(TESTS)

# Clock times, so apart from the tests that are right or wrong.
test-speed: $(INSTALLED)
	$(BIN)/pytest tests/speed

# In real ComfyUI: COMFYUI_PYTHON is an interpreter with ComfyUI's requirements, COMFYUI_PATH a checkout (~/ComfyUI).
test-comfy: $(INSTALLED)
	COMFYUI_PATH="$(COMFYUI_PATH)" COMFYUI_PYTHON="$(COMFYUI_PYTHON)" $(BIN)/pytest tests/comfy

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .

clean:
	rm -rf $(VENV) $(DEMO_OUT)
