.PHONY: check test
check:  ## lint, types, import contracts
	./launch.sh setup --dev
	.venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports
test:  ## everything, as CI does
	./launch.sh test
