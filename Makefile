# The way in for people; CMake presets (cmake --list-presets) are the way in for tools.
BUILD := build/release
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
TRACE ?= examples/traces/sample.jsonl
export FUZZ_SECONDS JOBS

.DEFAULT_GOAL := help
.PHONY: help demo build test bench format lint clean asan tsan fuzz python

help:  ## this list
	@awk -F ':.*## ' '/^[a-z% -]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: build  ## set up, build and serve a sample trace with the CPU kernels
	$(BUILD)/bin/mla replay $(TRACE)

build:  ## set up and build the library, the tool mla and the examples (build/release)
	@scripts/setup.sh build
	@scripts/configure.sh release
	cmake --build --preset release -j$(JOBS) --target mla_product

test:  ## set up and run every test: release, sanitizers, fuzzers, lint, format, install
	@scripts/test.sh

test-%:  ## the release tests of one kind: unit, property, contract, tools, install ...
	@scripts/test.sh release-$*

asan tsan fuzz python:  ## one part of make test: the sanitizer builds, the fuzz targets, the Python package
	@scripts/test.sh $@

lint:  ## format check and clang-tidy
	@scripts/test.sh format lint

bench: build  ## measure the attention kernels and the planner
	$(BUILD)/bin/mla bench
	@scripts/setup.sh test
	@scripts/configure.sh release
	cmake --build --preset release -j$(JOBS) --target benchmarks
	@set -e; for program in $(BUILD)/bench/*_bench; do "$$program"; done

format:  ## rewrite all sources in the project's format
	@scripts/setup.sh test
	git ls-files '*.cpp' '*.hpp' '*.h' '*.c' | xargs clang-format-16 -i
	@scripts/python.sh venv
	build/venv/bin/ruff check --quiet --fix && build/venv/bin/ruff format --quiet

clean:  ## remove everything that was built
	rm -rf build
