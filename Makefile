# The two commands a user needs are `make demo` and `make test`; both set up what is missing and leave nothing running.
# Python is the interpreter PL/Python embeds, so that library, controller and server run the same code.

PYTHON3   ?= /usr/bin/python3
PG_CONFIG ?= $(lastword pg_config $(sort $(wildcard /usr/lib/postgresql/*/bin/pg_config)))

# The server runs as another user when we are root: then the environment must lie where that user can read it.
reachable := $(shell [ "$$(id -u)" -ne 0 ] || setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$(CURDIR)" && echo yes)
home      := $(if $(reachable),$(CURDIR)/.venv,/var/lib/bismarck_dp/$(shell printf %s "$(CURDIR)" | cksum | cut -d' ' -f1))

python_sources := $(wildcard bismarck_dp/*.py controller/*.py) pyproject.toml
c_sources      := $(wildcard udf/*.c udf/*.h udf/kernels/*.c udf/kernels/*.h)
all_python     := bismarck_dp controller tests bench

.PHONY: env demo test lint format audit bench install clean

env: .venv/.extension .venv/.package

.venv/.created: pyproject.toml tools/install-system
	tools/install-system
	@[ -n "$(reachable)" ] || { mkdir -p "$(home)" && rm -rf .venv && ln -s "$(home)" .venv; }
	"$(PYTHON3)" -m venv "$(home)"
	.venv/bin/python -m pip install -q --disable-pip-version-check -U pip "setuptools>=64" wheel
	.venv/bin/python tools/requirements.py | xargs -d '\n' .venv/bin/python -m pip install -q --disable-pip-version-check
	touch $@

.venv/.package: .venv/.created $(python_sources)
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	rm -rf build *.egg-info
	touch $@

# Next to the package, where `bismarck_dp.embedded` finds it; PostgreSQL's own directories are not written.
.venv/.extension: .venv/.created $(c_sources) $(wildcard sql/*.sql) udf/Makefile udf/bismarck_dp.control.in bismarck_dp/version.py
	$(MAKE) -C udf PG_CONFIG=$(PG_CONFIG)
	$(MAKE) -C udf PG_CONFIG=$(PG_CONFIG) stage STAGE="$(CURDIR)/.venv/share/bismarck_dp"
	touch $@

demo: env
	.venv/bin/bismarck-dp demo

test: env
	.venv/bin/pytest

# Attacks every private algorithm for minutes, and writes the table in docs/privacy.md.
audit: env
	.venv/bin/python tools/audit.py $(AUDIT)

bench: env
	.venv/bin/python bench/run.py $(BENCH)
	PYTHONPATH=tests .venv/bin/python bench/noise.py
	.venv/bin/python bench/noisy.py
	.venv/bin/python bench/coordinates.py
	.venv/bin/python bench/dual.py
	.venv/bin/python bench/classes.py
	PYTHONPATH=tests .venv/bin/python bench/banco.py
	.venv/bin/python bench/predict.py
	PYTHONPATH=tests .venv/bin/python bench/ledger.py

lint: env
	.venv/bin/ruff check $(all_python) tools
	.venv/bin/ruff format --check $(all_python) tools
	.venv/bin/mypy -p bismarck_dp
	clang-format --dry-run -Werror $(c_sources) tests/*.c bench/*.c

format: env
	.venv/bin/ruff check --fix $(all_python) tools
	.venv/bin/ruff format $(all_python) tools
	clang-format -i $(c_sources) tests/*.c bench/*.c

# Into the PostgreSQL that PG_CONFIG names: the extension, and beside it the Python it runs. Needs the right to write there.
# Where the libraries come from elsewhere (Debian's packages, say): make install PIP_FLAGS="--no-deps --no-build-isolation"
install:
	$(MAKE) -C udf PG_CONFIG=$(PG_CONFIG) install
	$(PYTHON3) -m pip install -q --disable-pip-version-check --upgrade $(PIP_FLAGS) \
	    --target "$$($(PG_CONFIG) --pkglibdir)/bismarck_dp_python" .
	rm -rf build *.egg-info

clean:
	-$(MAKE) -C udf PG_CONFIG=$(PG_CONFIG) clean
	@[ ! -L .venv ] || rm -rf "$$(readlink -f .venv)"
	rm -rf .venv audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
