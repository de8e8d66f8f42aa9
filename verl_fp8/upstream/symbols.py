"""The table of every symbol of verl, vLLM and TransferQueue that this package names.

:mod:`verl_fp8.upstream.contract` compares it with what is installed.

Megatron's part of the table is in symbols_megatron.py, since nothing of it can be imported where Megatron is not.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """One thing of another package that a module of ours names.

    Attributes:
        path: dotted path of a module, function, class, method or attribute. ``path['a', 'b']`` is an entry of a
            mapping; a key that is no literal is a dotted path itself.
        why: what it is used for.
        used_by: our modules.
        parameters: of a callable, the ones passed or overridden, in their order; the callable must take them by these
            names and require no others. None: only the existence is relied on.
        forwarded: ours hands all other arguments on, so the callable may require more.
        attributes: of a class, attributes of its instances that we use; its methods must use them too.
    """

    path: str
    why: str
    used_by: tuple[str, ...]
    parameters: tuple[str, ...] | None = None
    forwarded: bool = False
    attributes: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The import name of the package it comes from."""
        return self.path.partition(".")[0]


def of(*used_by: str) -> Any:
    """``of("trainer.engine_fsdp")(path, why, *parameters)`` -> an entry of these modules.

    With ``bare=True`` only its existence is relied on.
    """

    def symbol(path: str, why: str, *parameters: str, bare: bool = False, **kwargs: Any) -> Symbol:
        return Symbol(path, why, used_by, None if bare else parameters, **kwargs)

    return symbol


_config, _check, _engine, _cpu, _stage = (
    of(name) for name in ("hooks.targets", "tools.overrides", "trainer.engine_fsdp", "cpu.platform", "correction.stage")
)
_adapter, _rollout, _vllm_cpu, _exact = (
    of(name) for name in ("sync.sender", "rollout.worker", "rollout.linear_cpu", "rollout.exact")
)
_derived = of("rollout.derived")
_corrections, _reweight = of("correction.verls_methods"), of("correction.reweight")
_replay, _moe = of("tools.runs.replay"), of("rollout.experts_cpu")
_kernel, _serving = of("rollout.linear_cpu", "rollout.linear_gpu"), of("rollout.serving")
_vllm_gpu, _moe_gpu, _certify = (
    of("rollout.linear_gpu"),
    of("rollout.experts_gpu"),
    of("tools.mismatch.certify_rollout"),
)
_FSDP = "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead"
_TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
_ADAPTER = "verl.workers.rollout.vllm_rollout.ServerAdapter"
_TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
_SENDER = f"{_TRANSFER}.BucketedWeightSender"
_WORKER = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
_KERNEL = "vllm.model_executor.kernels.linear.scaled_mm.Fp8BlockScaledMMLinearKernel"
_QUANT = "vllm.model_executor.layers.quantization.input_quant_fp8.QuantFP8"
_CONFIG = "vllm.model_executor.layers.quantization.base_config.QuantizationConfig"
_ROLLOUT_CORR = "verl.trainer.ppo.rollout_corr_helper"
_LAYERS = "vllm.model_executor.layers"
_MOE = f"{_LAYERS}.fused_moe"
_EXPERTS = f"{_MOE}.modular_kernel.FusedMoEExpertsModular"
_ATTENTION = "vllm.v1.attention.backends"
_PLATFORM = "verl.plugin.platform.platform_base.PlatformBase"

# fmt: off
SYMBOLS: tuple[Symbol, ...] = (
    # The driver's checks and verl's configuration classes.
    of("hooks.verl_plugin", "tools.overrides")("verl.utils.config.validate_config", "the driver's checks", "config",
        "use_reference_policy", "use_critic"),
    of("hooks.verl_plugin")(
        "verl.trainer.main_ppo.run_ppo", "the checks for other entry points", "config", "task_runner_class"),
    of("rules.run")("verl.trainer.main_ppo.TaskRunnerV1", "the one that trains with the V1 trainer", bare=True),
    _check("verl.trainer.ppo.utils.need_critic", "argument of validate_config", "config"),
    _check("verl.trainer.ppo.utils.need_reference_policy", "argument of validate_config", "config"),
    of("tools.overrides", "tools.explain")(
        "verl.utils.device.auto_set_device", "what main_ppo does before validate_config", "config"),
    of("layers.shapes", "tools.mismatch.certify", "tools.mismatch.attribute")(
        "verl.utils.fs.copy_to_local", "the model from where verl reads it", "src"),
    _config("verl.workers.config.FSDPActorConfig", "base class; picks the engine", "strategy", "fsdp_config"),
    _config("verl.workers.config.FSDPActorConfig.validate", "reaches the driver's checks", "n_gpus",
            "train_batch_size", "model_config"),
    _config("verl.workers.config.McoreActorConfig", "base class", "strategy", "megatron"),
    _config("verl.workers.config.McoreActorConfig.validate", "reaches the driver's checks", "n_gpus",
            "train_batch_size", "model_config"),
    _config("verl.workers.config.FSDPEngineConfig", "base class", "forward_only", "strategy", "dtype",
            "mixed_precision", "qat"),
    of("hooks.targets", "rules.megatron")(
        "verl.workers.config.McoreEngineConfig", "base class", "forward_only", "strategy", "dtype",
        "tensor_model_parallel_size", "expert_tensor_parallel_size", "dynamic_context_parallel",
        "override_transformer_config", "use_mbridge", "vanilla_mbridge", "use_megatron_fsdp", "qat"),
    of("rules.megatron")("verl.workers.config.McoreOptimizerConfig", "told the recipe", "override_optimizer_config"),
    of("hooks.targets", "rules.groups")(
        "verl.workers.config.HFModelConfig", "base class; built by the task runner", "path", "hf_config_path",
            "trust_remote_code",
            "external_lib", "override_config", "lora_rank", "lora", "lora_adapter_path", "mtp"),
    of("hooks.targets", "rules.groups")(
        "verl.workers.config.RolloutConfig", "base class; its engine_kwargs reach vLLM last", "name", "top_k",
            "top_p",
            "repetition_penalty", "dtype", "tensor_model_parallel_size", "logprobs_mode", "engine_kwargs",
            "calculate_log_probs",
            "checkpoint_engine", "quantization", "quantization_config_file", "qat"),
    # The doctor.
    of("tools.doctor.nodes")(
        "verl.trainer.constants_ppo.get_ppo_ray_runtime_env", "looks where a run's workers would be"),
    of("tools.doctor.facts")("vllm.plugins.load_general_plugins", "whether vLLM's processes load our entry point"),
    of("tools.doctor.facts")(
        "vllm.model_executor.kernels.linear._POSSIBLE_FP8_BLOCK_KERNELS[vllm.platforms.PlatformEnum.CPU]",
        "which kernels this machine has", bare=True),
    of("tools.doctor.facts")("vllm.platforms.current_platform", "whose kernels", bare=True),
    # The engine.
    of("trainer.engine_fsdp", "cpu.platform", "hooks.register")(
        "verl.workers.engine.base.EngineRegistry.register", "adds the engine", "model_type",
        "backend", "device"),
    of("trainer.engine_fsdp", "hooks.register")(
        "verl.workers.engine.base.EngineRegistry._engines", "asks whether it is there", bare=True),
    of("hooks.register")("verl.workers.engine.base.BaseEngine", "what the registry takes", bare=True),
    of("trainer.engine_fsdp", "tools.mismatch.certify")(
        "verl.utils.device.get_device_name", "which device's engine to add"),
    _engine(_FSDP, "base class", "model_config", "engine_config", "optimizer_config", "checkpoint_config",
            attributes=("rank", "model_config", "engine_config")),
    _engine(f"{_FSDP}._build_module", "the module before FSDP wraps it"),
    _engine(f"{_FSDP}.get_per_tensor_param", "overridden: the weights of a sync", "layered_summon", "base_sync_done"),
    _engine(f"{_FSDP}.get_per_tensor_param_shard", "this rank's part of the weights, in bf16"),
    _engine("verl.workers.engine.spec.ShardSpec", "where a part belongs", bare=True,
        attributes=("full_shape", "mesh", "placements")),
    _engine("verl.workers.engine.fsdp.transformer_impl.unfuse_moe_params", "experts under the checkpoint's names",
            "weights", "model_type"),
    _engine(f"{_FSDP}.train_batch", "carries the sync's figures", "data", "loss_function"),
    _engine(f"{_FSDP}.save_checkpoint", "keeps the recipe", "local_path"),
    _engine(f"{_FSDP}.load_checkpoint", "compares the recipe", "local_path"),
    # The correction stage.
    _stage(_TRAINER, "the V1 trainer", bare=True, attributes=("config",)),
    _stage(f"{_TRAINER}._compute_advantage", "advantages are reweighted after it", "batch", "metrics"),
    _stage(f"{_TRAINER}._update_actor", "refuses a batch without the stamp", "batch", "metrics"),
    _stage("verl.workers.utils.padding.response_to_nested", "stores advantages as verl does", "tensor",
           "response_mask"),
    _stage("transfer_queue.kv_batch_get", "reads the batch", "keys", "partition_id", "select_fields"),
    _stage("transfer_queue.kv_batch_put", "stores the advantages", "keys", "partition_id", "fields"),
    _stage("transfer_queue.KVBatchMeta", "carries the stamp", "keys", "partition_id", "extra_info"),
    # verl's own corrections.
    _corrections(f"{_ROLLOUT_CORR}.compute_rollout_correction_and_rejection_mask", "judges thresholds as verl will",
                 "old_log_prob",
                 "rollout_log_prob", "response_mask", "rollout_is", "rollout_is_threshold",
                 "rollout_is_batch_normalize", "rollout_rs",
                 "rollout_rs_threshold"),
    _reweight("verl.utils.tensordict_utils.make_iterator", "the rows of a mini-batch", "tensordict",
                 "mini_batch_size", "epochs", "seed",
                 "dataloader_kwargs"),
    _replay(f"{_ROLLOUT_CORR}.compute_rollout_correction_weights", "verl's weights on a dump", "log_ratio",
            "response_mask", "rollout_is",
            "rollout_is_threshold", "rollout_is_batch_normalize"),
    _replay(f"{_ROLLOUT_CORR}.compute_rollout_rejection_mask", "verl's rejection on a dump", "log_ratio",
            "response_mask", "rollout_rs",
            "rollout_rs_threshold"),
    of("rules.resume")(
        "verl.utils.checkpoint.checkpoint_manager.find_latest_ckpt_path", "whether a run resumes", "path"),
    of("rules.resume")(
        "verl.utils.checkpoint.checkpoint_manager.get_checkpoint_tracker_filename", "names it", "root_path"),
    # The weight sync, both ends.
    of("hooks.register")("verl.workers.rollout.base._ROLLOUT_REGISTRY['vllm', 'async']", "names the server adapter",
        bare=True),
    _adapter(_ADAPTER, "base class", "config", "model_config", "device_mesh",
             attributes=("config", "use_shm", "zmq_handle", "server_handle", "_has_server")),
    _adapter(f"{_ADAPTER}.update_weights", "one sync", "weights", "global_steps", "wire_format"),
    _adapter(f"{_ADAPTER}._execute_method", "starts the receivers", "method", "non_block", "kwargs"),
    _adapter(_SENDER, "streams the buckets", "zmq_handle", "bucket_size_mb", "use_shm", attributes=("socket",)),
    _adapter(f"{_SENDER}._init_buffer", "the shared segment belongs to the sender"),
    _adapter(f"{_SENDER}._init_socket", "the socket that is watched"),
    _adapter(f"{_SENDER}.async_send_weights", "streams the buckets", "weights"),
    _rollout(_WORKER, "base class", bare=True, attributes=("model_runner",)),
    _rollout(f"{_WORKER}.update_weights_from_ipc", "one sync", forwarded=True),
    _rollout(f"{_WORKER}._update_weights", "one bucket", "weights", "peft_config", "base_sync_done"),
    _rollout("vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod", "recognises FP8 layers", bare=True,
             attributes=("block_quant", "fp8_linear")),
    _rollout("vllm.model_executor.layers.quantization.fp8.Fp8MoEMethod", "recognises FP8 experts", bare=True,
             attributes=("block_quant", "moe_kernel")),
    _rollout("vllm.distributed.get_tensor_model_parallel_rank", "which shard a worker holds"),
    # What vLLM derives after loading.
    _derived("vllm.model_executor.layers.attention.MLAAttention", "decodes with weights made from kv_b_proj", bare=True,
             attributes=("kv_b_proj", "kv_lora_rank", "num_heads", "qk_nope_head_dim", "v_head_dim", "W_UK_T", "W_UV",
                         "impl")),
    _derived("vllm.model_executor.layers.attention.MLAAttention.process_weights_after_loading", "makes them",
             "act_dtype"),
    _derived("vllm.model_executor.layers.attention.MLAAttention._v_up_proj", "probed: the product with W_UV", "x",
             "out"),
    _derived("vllm.model_executor.layers.attention.Attention.process_weights_after_loading", "asks the backend",
             "act_dtype"),
    _derived("vllm.model_executor.layers.attention.MMEncoderAttention.process_weights_after_loading", "no weights",
             "act_dtype"),
    _derived(f"{_MOE}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.process_weights_after_loading",
             "experts in the kernel's layout", "layer"),
    _derived(f"{_LAYERS}.linear.UnquantizedLinearMethod", "makes nothing that ours does not replace", bare=True),
    _derived(f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod", "makes nothing", bare=True),
    _derived(f"{_LAYERS}.quantization.base_config.QuantizeMethodBase.process_weights_after_loading", "makes nothing",
             "layer"),
    _derived(f"{_LAYERS}.quantization.kv_cache.BaseKVCacheMethod", "scales of the cache, not of weights", bare=True),
    _derived(f"{_LAYERS}.quantization.fp8.Fp8LinearMethod", "staged by verl", bare=True),
    _derived(f"{_LAYERS}.quantization.fp8.Fp8MoEMethod", "staged by verl", bare=True),
    _derived("vllm.platforms.cpu.CpuPlatform.check_and_update_config", "wrapped: no packed MLA", "vllm_config"),
    _derived("vllm.v1.attention.backends.registry.AttentionBackendEnum", "CPU_MLA, where it has one, leaves kv_b_proj",
             bare=True),
    _derived("vllm.model_executor.layers.quantization.fp8.Fp8Config", "whether verl calls the hooks", bare=True),
    _derived("vllm._custom_ops.causal_conv1d_weight_pack", "the layout of a packed convolution", "weight"),
    _derived("vllm.distributed.parallel_state.get_dcp_group", "whose heads of a gathered W_UK are this rank's"),
    # The certificate.
    of("tools.mismatch.certify")(
        "verl.utils.torch_functional.logprobs_from_logits", "log-probs as the trainer takes them", "logits",
        "labels"),
    _certify(f"{_TRANSFER}.BucketedWeightReceiver", "replaced: the stream comes out of a file", "device",
             forwarded=True),
    _certify(f"{_TRANSFER}.BucketedWeightReceiver.receive_weights", "replaced", "on_bucket_received"),
    _certify(f"{_WORKER}._get_zmq_handle", "overridden: no socket"),
    _certify(f"{_WORKER}.monkey_patch_model", "as verl's server does", "vocab_size", "banned_token_ids"),
    _certify("vllm.LLM.collective_rpc", "runs the extension's methods", "method", "args", "kwargs"),
    _certify("vllm.SamplingParams", "fixed answers, and their log-probs", bare=True),
    # vLLM on CPU.
    _vllm_cpu("vllm.model_executor.kernels.linear._POSSIBLE_FP8_BLOCK_KERNELS[vllm.platforms.PlatformEnum.CPU]",
              "the kernel table", bare=True),
    _vllm_cpu("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", "packs weights; wrapped", "layer",
              "remove_weight"),
    _vllm_cpu("vllm.config.get_current_vllm_config", "finds the fp8 node"),
    _vllm_cpu("vllm.platforms.current_platform.is_cpu", "where the kernel serves"),
    _kernel(_KERNEL, "base class", "config"),
    _kernel(f"{_KERNEL}.is_supported", "overridden", "compute_capability"),
    _kernel(f"{_KERNEL}.can_implement", "overridden", "config"),
    _kernel(f"{_KERNEL}.process_weights_after_loading", "overridden: keeps the parameters", "layer"),
    _kernel(f"{_KERNEL}.apply_weights", "overridden: the product", "layer", "x", "bias"),
    _kernel(f"{_KERNEL}.apply_block_scaled_mm", "abstract", "A", "B", "As", "Bs"),
    _vllm_cpu("vllm.config.get_current_vllm_config_or_none", "finds the fp8 node"),
    _vllm_cpu(f"{_LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding", "recognises the output head", bare=True),
    _vllm_cpu(f"{_LAYERS}.quantization.QUANTIZATION_METHODS", "asks whether the method is there", bare=True),
    _vllm_cpu(f"{_LAYERS}.quantization.register_quantization_config", "adds the method", "quantization"),
    _vllm_cpu(f"{_CONFIG}.override_quantization_method", "overridden: names the method", "hf_quant_cfg", "user_quant",
              "hf_config"),
    _vllm_cpu(f"{_CONFIG}.get_quant_method", "overridden: which layers", "layer", "prefix"),
    _vllm_cpu(f"{_CONFIG}.from_config", "overridden", "config"),
    _vllm_cpu(f"{_LAYERS}.quantization.utils.quant_utils.is_layer_skipped", "which layers stay in bf16", "prefix",
              "ignored_layers", "fused_mapping"),
    _vllm_cpu(f"{_LAYERS}.linear.register_weight_loader_v2_supported_method", "loads by parameter class", bare=True),
    _vllm_cpu(f"{_LAYERS}.linear.LinearMethodBase.create_weights", "overridden", "layer", "input_size_per_partition",
              "output_partition_sizes", "input_size", "output_size", "params_dtype"),
    _vllm_cpu(f"{_LAYERS}.linear.LinearMethodBase.apply", "overridden: the product", "layer", "x", "bias"),
    _vllm_cpu(f"{_LAYERS}.linear.UnquantizedLinearMethod", "of the layers kept", bare=True),
    _vllm_cpu(f"{_LAYERS}.linear.LinearBase", "which modules are linear layers", bare=True),
    _vllm_cpu("vllm.model_executor.parameter.ModelWeightParameter", "holds codes", bare=True),
    _vllm_cpu("vllm.model_executor.parameter.PerTensorScaleParameter", "one scale a part, on every rank", bare=True),
    _vllm_cpu("vllm.model_executor.parameter.ChannelQuantScaleParameter", "one scale a row, divided with the rows",
        bare=True),
    # vLLM on a GPU.
    of("hooks.vllm_plugin")("vllm.platforms.current_platform.is_cuda", "whether to register for CUDA"),
    _vllm_gpu("vllm.platforms.current_platform.is_cuda", "where the kernel serves"),
    _serving("vllm.config.get_current_vllm_config_or_none", "finds the fp8 node"),
    _vllm_gpu("vllm.model_executor.custom_op.CustomOp.register_oot", "replaces the quantiser", "name"),
    _vllm_gpu("vllm.model_executor.custom_op.op_registry_oot", "asks whether it is replaced", bare=True),
    _vllm_gpu(_QUANT, "base class", "static", "group_shape", "column_major_scales", "tma_aligned_scales", "use_ue8m0",
              attributes=("is_group_quant", "group_size", "use_deep_gemm_supported")),
    _vllm_gpu(f"{_QUANT}.name", "the name compilation configs know", bare=True),
    _vllm_gpu("vllm.model_executor.layers.quantization.input_quant_fp8.DeepGemmQuantScaleFMT.from_oracle",
              "whether scales are packed"),
    _vllm_gpu("vllm.model_executor.kernels.linear._POSSIBLE_FP8_BLOCK_KERNELS[vllm.platforms.PlatformEnum.CUDA]",
              "the kernel table", bare=True),
    _vllm_gpu("vllm.model_executor.kernels.linear._LINEAR_BACKEND_KERNEL_MAP['torch']", "the kernel's backend name",
              bare=True),
    _vllm_gpu("vllm.model_executor.layers.quantization.utils.fp8_utils.requant_weight_ue8m0_inplace",
              "wrapped: keeps power-of-two scales", "weight", "weight_scale", "block_size"),
    # vLLM's experts on a GPU.
    *(
        _moe_gpu(f"{_MOE}.{module}.per_token_group_quant_fp8", "wrapped: experts' activations", "x", "group_size",
            "eps",
                 "dtype", "column_major_scales", "tma_aligned_scales", "out_q", "use_ue8m0")
        for module in ("utils", "experts.deep_gemm_moe")
    ),
    _moe_gpu(f"{_MOE}.experts.deep_gemm_moe.silu_mul_per_token_group_quant_fp8_colmajor",
        "wrapped: activation and quantiser",
             "input", "output", "use_ue8m0", "eps", "clamp_limit", "group_size", "alpha", "beta"),
    _moe_gpu("vllm._custom_ops.silu_and_mul_per_block_quant", "wrapped: activation and quantiser", "input",
        "group_size",
             "quant_dtype", "scale_ub", "is_scale_transposed"),
    # vLLM's experts on CPU.
    _moe("vllm.config.get_current_vllm_config", "finds the fp8 node"),
    _moe("vllm.config.get_current_vllm_config_or_none", "finds the fp8 node"),
    _moe("vllm.platforms.current_platform.is_cpu", "where the classes serve"),
    _moe(f"{_MOE}.oracle.fp8.backend_to_kernel_cls", "chooses the class; wrapped", "backend"),
    _moe(f"{_MOE}.oracle.fp8.Fp8MoeBackend.TRITON", "the backend without a weight layout of its own", bare=True),
    _moe(f"{_MOE}.oracle.unquantized.backend_to_kernel_cls", "chooses the class; wrapped", "backend"),
    _moe(f"{_MOE}.oracle.unquantized.UnquantizedMoeBackend.CPU", "the backend replaced", bare=True),
    _moe(_EXPERTS, "base class", "moe_config", "quant_config", forwarded=True),
    _moe(f"{_EXPERTS}.w1_scale", "the scales of gate and up", bare=True),
    _moe(f"{_EXPERTS}.w2_scale", "the scales of down", bare=True),
    _moe(f"{_MOE}.modular_kernel.FusedMoEActivationFormat.Standard", "tokens in one matrix", bare=True),
    _moe(f"{_EXPERTS}.workspace_shapes", "overridden", "M", "N", "K", "topk", "global_num_experts", "local_num_experts",
         "expert_tokens_meta", "activation"),
    _moe(f"{_EXPERTS}.apply", "overridden: the product", "output", "hidden_states", "w1", "w2", "topk_weights",
         "topk_ids",
         "activation", "global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2",
         "expert_tokens_meta", "apply_router_weight_on_input"),
    _moe(f"{_MOE}.activation.MoEActivation.SILU", "the activation computed", bare=True),
    _moe(f"{_MOE}.topk_weight_and_reduce.TopKWeightAndReduceNoOP", "ours weighs and sums itself"),
    _moe("vllm.model_executor.layers.quantization.utils.quant_utils.kFp8Dynamic128Sym", "what the oracle asks for",
         bare=True),
    _exact("vllm.model_executor.custom_op.CustomOp.register_oot", "replaces an operator", "name"),
    _exact("vllm.model_executor.custom_op.op_registry_oot", "asks whether it is replaced", bare=True),
    _exact(f"{_LAYERS}.layernorm.RMSNorm.forward_native", "overridden", "x", "residual"),
    _exact(f"{_LAYERS}.layernorm.RMSNorm", "base class", bare=True, attributes=("weight", "variance_epsilon")),
    _exact(f"{_LAYERS}.activation.SiluAndMul.forward_native", "overridden", "x"),
    _exact(f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_native", "overridden", "positions", "query",
           "key"),
    _exact(f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding._compute_cos_sin_cache", "overridden"),
    _exact(f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding", "base class", bare=True,
           attributes=("max_position_embeddings", "rotary_dim", "base", "cos_sin_cache", "head_size")),
    _exact(f"{_ATTENTION}.cpu_attn.CPUAttentionBackend.get_impl_cls", "overridden"),
    _exact(f"{_ATTENTION}.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update", "overridden", "layer", "key", "value",
           "kv_cache",
           "slot_mapping"),
    _exact(f"{_ATTENTION}.cpu_attn.CPUAttentionBackendImpl.forward", "overridden", "layer", "query", "key", "value",
           "kv_cache",
           "attn_metadata", "output", "output_scale", "output_block_scale"),
    _exact(f"{_ATTENTION}.registry.register_backend", "replaces the CPU backend", "backend", "class_path"),
    _exact(f"{_ATTENTION}.registry.AttentionBackendEnum.CPU_ATTN", "the backend replaced", bare=True),
    # The CPU platform.
    _cpu("verl.plugin.platform.platform_manager.PlatformRegistry.register", "adds the platform", "platform"),
    _cpu(_PLATFORM, "base class"),
    _cpu("verl.utils.distributed.initialize_global_process_group_ray", "wrapped: plain gloo", "backend"),
    _cpu(f"{_FSDP}._build_fsdp_module", "overridden: no pinned offload", "module"),
    of("cpu.replay_buffer")("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.__init__", "a shorter poll", "trainer_mode",
        "poll_interval", forwarded=True),
    of("cpu.replay_buffer")(
        "verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync.__init__", "a shorter poll", "poll_interval",
        forwarded=True),
)
# fmt: on
