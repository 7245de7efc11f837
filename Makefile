CONFIG ?= experiments/quickstart.yaml
ARGS ?=
EXPERIMENT ?= $(filter-out ppo_8b quickstart_pair trace_full,$(patsubst experiments/%.py,%,$(sort $(wildcard experiments/*.py))))
JOBS ?= 2

.PHONY: run test experiments experiments-full analysis slurm-test bench-adapt bench-admission bench-checkpoints bench-controller bench-faults bench-gpu-check bench-overhead bench-plan bench-planner bench-published bench-transition baselines-check verl-parity gpu-contract check setup clean

run: setup  ## train CONFIG (dotted overrides in ARGS)
	@.venv/bin/nereus train $(CONFIG) $(ARGS)

test: setup  ## all tests; ARGS are pytest's
	@bash scripts/run_tests $(ARGS)

experiments: setup  ## carry out EXPERIMENT (default: all that are simulated; finished runs are skipped; overrides and --only in ARGS), JOBS at a time, and collect the tables; by default also what deciding costs, published steps (POINTS=DIR), and 5 % of the runs again, byte for byte
	@set -e; for name in $(EXPERIMENT); do \
	  .venv/bin/nereus experiment run $$name --jobs $(JOBS) $(ARGS); .venv/bin/nereus experiment collect $$name $(ARGS); done
ifeq ($(origin EXPERIMENT),file)
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.overhead --most 1024
	@[ -z "$(POINTS)" ] || OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.published_steps --points $(POINTS) --table runs/accuracy/table.parquet
	@set -e; for name in $(EXPERIMENT); do .venv/bin/nereus experiment verify $$name --jobs $(JOBS); done
endif

experiments-full: setup  ## experiments/trace.py with ten seeds, and its table: about half an hour on two cores
	@.venv/bin/nereus experiment run trace_full --jobs $(JOBS) $(ARGS)
	@.venv/bin/nereus experiment collect trace_full $(ARGS)

analysis: setup  ## draw every figure of analysis/ into analysis/figures/, from collected tables, those that ship, or marked samples
	@failed=0; for script in analysis/*.py; do .venv/bin/python "$$script" || { echo "$$script failed" >&2; failed=1; }; done; exit $$failed

slurm-test: setup  ## jobs on a real Slurm of two nodes on this host (root; installs slurm-wlm and munge if missing)
	@NEREUS_SLURM_TEST=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/slurm $(ARGS)

bench-adapt: setup  ## the real job under one schedule: nereus beside dp-scaling, restart, fixed and static plans, 3 runs each: about 28 minutes; ARGS: --folder F, --json FILE, --only WORD, --repeats N, --steps N
	@OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m benchmarks.adapt $(ARGS)

bench-admission: setup  ## admission against the best in hindsight on synthetic traces: about 5 minutes
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.admission $(ARGS)

bench-checkpoints: setup  ## runs that are killed in the middle of a save or stopped, then resumed: minutes
	@NEREUS_BENCH_CHECKPOINTS=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/live/test_checkpoint_endings.py tests/live/test_endings.py -s $(ARGS)

bench-controller: setup  ## events, searches and prices at 64 to 16,384 slots, the search against brute force, its bounds: minutes; ARGS: events growth search price instances gaps
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.controller $(ARGS)

bench-faults: setup  ## slots and drivers that die or fail at each kind of operation of a change, in each mode: 20 minutes; ARGS: words of the cases, or every: 35 minutes
	@OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m benchmarks.faults $(ARGS)
	@[ -n "$(filter-out every,$(ARGS))" ] || NEREUS_BENCH_CHECKPOINTS=1 OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m pytest -q -s tests/live/test_checkpoint_endings.py -k "change $(if $(ARGS),,and commit)"
	@[ -n "$(filter-out every,$(ARGS))" ] || NEREUS_BENCH_ATTACH=1 OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m pytest -q -s tests/live/test_attaching.py $(if $(ARGS),,-k train)

bench-gpu-check: setup  ## scripts/gpu_check as a command on the CPU: every step passes on two slots, a step that fails is told on one: a minute and a half
	@NEREUS_BENCH_GPU_CHECK=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/live/test_gpu_check.py $(ARGS)

bench-overhead: setup  ## what deciding costs at 64 to 16,384 slots, and the simulator's own time and memory, as the table of analysis/overhead.py: 3 minutes; ARGS: --most N --table FILE
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.overhead $(ARGS)

bench-plan: setup  ## seconds and memory of `nereus plan` for 16 and 1,024 GPUs
	@.venv/bin/python -m benchmarks.plan

bench-planner: setup  ## seconds, memory and gaps of the transfer planner, beside Megatron-core's; ARGS: changes gaps peer
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planner $(ARGS)

bench-published: setup  ## the simulated world against published RL step times, in the tables of POINTS: a minute
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.published_steps --points $(POINTS)

bench-transition: setup  ## transitions in numbers: random graphs (ARGS: [instances] [first seed]); live changes beside checkpoint, restart, Megatron-core and raw gloo (LIVE_ARGS: --json FILE, --pairs N)
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.core.bench_transition $(ARGS)
	@OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m benchmarks.transition $(LIVE_ARGS)

baselines-check: setup  ## verl's and OpenRLHF's own parsers judge our command lines (own environments in build/, 1 GB each; needs the index once)
	@failed=0; for system in verl openrlhf; do .venv/bin/python -m baselines.$$system.check || failed=1; done; exit $$failed

verl-parity: setup  ## one PPO step of verl's trainer functions beside one of Nereus (same environment as baselines-check): a minute
	@OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m baselines.verl.parity

gpu-contract: setup  ## what the engines touch of Megatron-core, vLLM and Ray, in their newest wheels (0.4 GB, not installed); ARGS: --offline --resolve
	@.venv/bin/python -m scripts.gpu_contract $(ARGS)

check: setup  ## ruff, pyright, import rule
	@bash scripts/check

setup:  ## .venv with everything pinned; PYTHON=... chooses the interpreter
	@PYTHON="$(PYTHON)" bash scripts/setup

clean:  ## what set-up, tests and checks made; keeps runs/
	rm -rf .venv build nereus.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find nereus tests experiments scripts analysis baselines benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
