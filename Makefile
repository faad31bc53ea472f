.PHONY: check test
check:  ## lint, types, import contracts
	./launch.sh setup --dev
	.venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports
test:  ## everything, as CI does
	./launch.sh test
.PHONY: bench-pipeline bench-overheads
bench-pipeline:  ## serial, CGP, hard and soft frontier against the bound: about an hour on a quiet two-core machine
	.venv/bin/python -m tests.bench.pipeline
bench-overheads:  ## what coordinators, log, channel and publishing cost beside the work
	.venv/bin/python -m tests.bench.overheads
.PHONY: faults bench-control
faults:  ## every fault for real, SGLang and Megatron; prints the table of docs/faults.md (root, Slurm's packages)
	./launch.sh setup --dev
	.venv/bin/python -m tests.faults
bench-control:  ## the control plane at scale: the coordinators alone, then a job of 64 ranks
	./launch.sh setup --dev
	.venv/bin/python -m tests.bench.control_plane
	.venv/bin/python -m tests.bench.control_plane --job
