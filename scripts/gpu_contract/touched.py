"""What the engines touch of Megatron-core, vLLM and Ray: read from their own source, and a list of what it cannot show.

From the source: imports, names and members of what is imported, the arguments of calls of it. What an object that some
call returned has cannot be read there, so `MEMBERS` says it; a test holds that each word of it still occurs in the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_contract.sources import words

PACKAGES = ("megatron", "vllm", "ray")
ROOT = Path(__file__).parents[2]
FILES = (
    "nereus/engines/megatron/architecture.py",
    "nereus/engines/megatron/engine.py",
    "nereus/engines/megatron/groups.py",
    "nereus/engines/megatron/steps.py",
    "nereus/engines/vllm/boot.py",
    "nereus/engines/vllm/engine.py",
    "nereus/runtime/cluster.py",
    "nereus/runtime/pool.py",
)
"""`megatron/cpu.py` has no place here: it is what Megatron needs without CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Touch:
    """One thing that must be there: `module`.`name`, a `member` of that class, or its call with `positional` arguments
    and `keywords`; `where` is file and line.
    """

    where: str
    module: str
    name: str
    member: str = ""
    called: bool = False
    positional_count: int = 0
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        of = f"{self.module}.{self.name}" if self.name else self.module
        if self.called:
            return f"{of}({', '.join([*['_'] * self.positional_count, *(f'{each}=' for each in self.keywords)])})"
        return f"{of}.{self.member}" if self.member else of


def touched(root: Path = ROOT) -> tuple[Touch, ...]:
    """All that the engines touch, each once."""
    found: dict[tuple[object, ...], Touch] = {}
    for file in FILES:
        for touch in (*of_source(file, (root / file).read_text()), *members_of(file, (root / file).read_text())):
            key = touch.module, touch.name, touch.member, touch.called, touch.positional_count, touch.keywords
            found.setdefault(key, touch)
    return tuple(found.values())


def of_source(file: str, text: str) -> Iterator[Touch]:
    """What a file's own source shows."""
    tree = ast.parse(text)
    names: dict[str, tuple[str, str]] = {}  # local name -> module, name in it
    for node in ast.walk(tree):
        for alias, module, name in _imported(node):
            names[alias] = module, name
            yield Touch(where=f"{file}:{getattr(node, 'lineno', 0)}", module=module, name=name)
    options = _dictionaries(tree)
    for node in ast.walk(tree):
        chain = words(node.func if isinstance(node, ast.Call) else node) if isinstance(node, ast.expr) else []
        if not chain or chain[0] not in names or any(word.startswith("__") for word in chain):
            continue
        module, name = names[chain[0]]
        if isinstance(node, ast.Attribute):
            yield Touch(where=f"{file}:{node.lineno}", module=module, name=name, member=".".join(chain[1:]))
        elif isinstance(node, ast.Call):
            yield Touch(
                where=f"{file}:{node.lineno}",
                module=module,
                name=".".join(part for part in (name, *chain[1:]) if part),
                called=True,
                positional_count=sum(not isinstance(each, ast.Starred) for each in node.args),
                keywords=tuple(_keywords(node, options)),
            )


def _imported(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(local name, module, name in it) of what an import statement takes from the packages."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
        for alias in node.names:
            yield alias.asname or alias.name, node.module or "", alias.name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            package = alias.name.split(".")[0]
            if package in PACKAGES:
                yield alias.asname or package, alias.name if alias.asname else package, ""


def _dictionaries(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Keys of dict literals that the file names or that its functions return: what `**name` and `**name()` stand for."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as value):
                found[name] = _keys(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as value):
                found[name] = _keys(value)
            case ast.FunctionDef(name=name, body=body) if isinstance(body[-1], ast.Return):
                if isinstance(body[-1].value, ast.Dict):
                    found[name] = _keys(body[-1].value)
    return found


def _keys(node: ast.Dict) -> tuple[str, ...]:
    return tuple(key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _keywords(call: ast.Call, options: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
            continue
        for node in ast.walk(keyword.value):
            if isinstance(node, ast.Name):
                yield from options.get(node.id, ())


def members_of(file: str, text: str) -> Iterator[Touch]:
    """What MEMBERS says of a file, with the line where its last word stands."""
    lines = text.splitlines()
    for module, name, listed in MEMBERS.get(file, ()):
        for word in listed.split() or [""]:
            member, _, given = word.partition("(")
            last = (member or name).split(".")[-1]
            parts = [part for part in given.rstrip(")").split(",") if part]
            yield Touch(
                where=f"{file}:{next((n for n, line in enumerate(lines, 1) if last in line), 0)}",
                module=module,
                name=f"{name}.{member}".rstrip(".") if given else name,
                member="" if given else member,
                called=bool(given),
                positional_count=sum(not part.endswith("=") for part in parts),
                keywords=tuple(part[:-1] for part in parts if part.endswith("=")),
            )


SCHEDULE = (
    "(forward_step_func=,data_iterator=,model=,num_microbatches=,seq_length=,micro_batch_size=,forward_only=,"
    "collect_non_loss_data=)"
)
MEMBERS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "nereus/engines/megatron/engine.py": (
        ("megatron.core.models.gpt", "GPTModel", "output_layer"),
        ("megatron.core.distributed", "DistributedDataParallel", "buffers expert_parallel_buffers"),
        ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBuffer", "grad_data"),
        ("megatron.core.optimizer", "ChainedOptimizer", "chained_optimizers"),
        (
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer",
            "model_param_gbuf_map model_param_group_index_map _get_model_param_range_map optimizer",
        ),
    ),
    "nereus/engines/megatron/groups.py": (
        ("megatron.core.parallel_state", "_TENSOR_MODEL_PARALLEL_GROUP", ""),
        ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding", "forward"),
    ),
    "nereus/engines/megatron/steps.py": (
        ("megatron.core.distributed", "DistributedDataParallel", "zero_grad_buffer"),
        ("megatron.core.optimizer", "ChainedOptimizer", "zero_grad step param_groups"),
        *(
            ("megatron.core.pipeline_parallel.schedules", name, SCHEDULE)
            for name in ("forward_backward_no_pipelining", "forward_backward_pipelining_without_interleaving")
        ),
    ),
    "nereus/engines/vllm/engine.py": (
        (
            "vllm.v1.engine.llm_engine",
            "LLMEngine",
            (
                "from_engine_args(_) add_request(_,_,_) step has_unfinished_requests reset_prefix_cache"
                " collective_rpc(_,kwargs=) model_executor model_config engine_core renderer output_processor"
            ),
        ),
        ("vllm.v1.engine.core_client", "EngineCoreClient", "shutdown"),
        ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "driver_worker"),
        ("vllm.v1.worker.worker_base", "WorkerWrapperBase", "worker"),
        ("vllm.v1.worker.gpu_worker", "Worker", "get_model model_runner reload_weights"),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "kv_caches reload_weights(weights_iterator=)"),
        ("vllm.config", "ModelConfig", "get_num_experts get_vocab_size hf_config"),
        ("vllm.v1.engine.output_processor", "OutputProcessor", "request_states"),
        ("vllm.v1.engine.output_processor", "RequestState", "detokenizer logprobs_processor external_req_id"),
        ("vllm.v1.engine.detokenizer", "IncrementalDetokenizer", "output_token_ids"),
        ("vllm.v1.engine.logprobs", "LogprobsProcessor", "logprobs"),
        ("vllm.outputs", "RequestOutput", "finished request_id outputs"),
        ("vllm.outputs", "CompletionOutput", "token_ids logprobs finish_reason"),
        ("vllm.model_executor.model_loader.reload.types", "LayerReloadingInfo", "restore_metadata"),
        ("vllm.model_executor.models.llama", "LlamaForCausalLM", "packed_modules_mapping"),
    ),
    "nereus/engines/vllm/boot.py": (
        ("vllm.platforms.interface", "Platform", "is_cpu register_triton_kernel_overrides"),
        ("vllm.distributed.parallel_state", "GroupCoordinator", "destroy"),
    ),
}
"""By file: (module, class, members; `member(_,key=)` is a call of one)."""
