"""Keys of other tools, and the key of job.yaml that sets the same.

The words are those of Hugging Face's trainer, PyTorch Lightning, torchrun, Slurm, SkyPilot, xpk,
Kubernetes and others. They are compared without case, underscores and dashes, so that
`learningRate`, `learning-rate` and `learning_rate` are one word.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """The counterpart in job.yaml of a key of another tool.

    Attributes:
        key: Dotted path in job.yaml, or None if no key is needed.
        note: How the key differs, or what to do if there is none.
        value: A value of the key.
    """

    key: str | None
    note: str = ""
    value: str = ""

    @property
    def hint(self) -> str:
        """The advice of an error about the word."""
        if self.key is None:
            return self.note
        value, note = (f": {self.value}" * bool(self.value), f", {self.note}" * bool(self.note))
        return f"write {self.key}{value}{note}."


_SAME_COMMAND = Counterpart(None, "leave it out: the same command continues from its checkpoint.")
_NO_ADDRESSES = Counterpart(None, "leave it out: the launcher connects the hosts by itself.")
_COMPILED = Counterpart(None, "leave it out: every step is compiled.")
_MANIFEST = Counterpart(
    None,
    "this is a manifest of Kubernetes, not a job.yaml: `kubectl apply -f` submits it, `launcher "
    "init` writes a job.yaml.",
)

# One row for each counterpart: the words that it answers.
_ROWS: tuple[tuple[Counterpart, str], ...] = (
    # --- the loop of the training ---
    (
        Counterpart("train.batch", "the examples of a step, over all devices"),
        "batch_size bs train_batch_size global_batch_size total_batch_size",
    ),
    (
        Counterpart("train.batch", "the examples of a step, over all devices and micro-batches"),
        "per_device_train_batch_size per_device_batch_size per_gpu_batch_size micro_batch_size "
        "train_micro_batch_size_per_gpu device_batch_size local_batch_size",
    ),
    (
        Counterpart("train.steps"),
        "max_steps num_steps total_steps n_steps num_train_steps train_steps training_steps "
        "max_iters num_iters iterations num_iterations max_iterations train_iters",
    ),
    (
        Counterpart("train.epochs"),
        "num_epochs num_train_epochs max_epochs n_epochs total_epochs nb_epochs",
    ),
    (
        Counterpart("train.accumulate", "micro-batches per step"),
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum "
        "grad_accum_steps accumulation_steps accum_steps num_microbatches",
    ),
    (
        Counterpart("train.precision", value="bf16", note="or fp16, tf32, fp32"),
        "fp16 bf16 mixed_precision amp use_amp half bfloat16 float16 dtype torch_dtype use_bf16 "
        "use_fp16",
    ),
    (
        Counterpart("train.remat", value="full"),
        "gradient_checkpointing activation_checkpointing activation_checkpoint remat_policy "
        "grad_checkpointing recompute",
    ),
    (Counterpart("train.seed"), "random_seed manual_seed rng_seed prng_seed random_state"),
    (
        Counterpart("train.stop_early", value="{metric: eval/loss, patience: 3}"),
        "early_stopping early_stop early_stopping_callback",
    ),
    (Counterpart("train.stop_early.patience"), "early_stopping_patience patience"),
    (Counterpart("train.log_every"), "logging_steps log_interval log_every_n_steps log_freq"),
    (Counterpart("train.attention"), "flash_attention use_flash_attention attn_implementation"),
    (Counterpart("train.profile"), "profiler profiling profile_steps xprof nsys"),
    (Counterpart("train.on_nonfinite"), "detect_anomaly debug_nans terminate_on_nan"),
    (_COMPILED, "torch_compile jit compile_model jit_compile"),
    (_SAME_COMMAND, "resume resume_from resume_from_checkpoint auto_resume resume_training"),
    # --- the optimizer and the loss ---
    (
        Counterpart("train.optimizer.lr"),
        "learning_rate base_lr max_lr peak_lr peak_learning_rate init_lr initial_lr",
    ),
    (Counterpart("train.optimizer.weight_decay"), "wd l2 adam_weight_decay"),
    (
        Counterpart("train.optimizer.schedule"),
        "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_policy learning_rate_schedule",
    ),
    (
        Counterpart("train.optimizer.schedule.warmup", "a number of steps"),
        "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup_ratio warmup_epochs "
        "warmup_fraction",
    ),
    (
        Counterpart("train.optimizer.schedule.final", "a fraction of lr"),
        "min_lr end_lr eta_min min_lr_ratio final_lr lr_min",
    ),
    (
        Counterpart("train.optimizer.clip"),
        "max_grad_norm grad_clip gradient_clip gradient_clip_val clip_grad_norm clip_norm "
        "gradient_clipping grad_norm_clip",
    ),
    (Counterpart("train.optimizer.b1"), "beta1 beta_1 adam_beta1 betas adam_b1"),
    (Counterpart("train.optimizer.b2"), "beta2 beta_2 adam_beta2 adam_b2"),
    (Counterpart("train.optimizer.eps"), "adam_epsilon adam_eps epsilon"),
    (Counterpart("train.optimizer.name"), "optim optimizer_name optimizer_type"),
    (Counterpart("train.optimizer.ema"), "ema_decay use_ema model_ema weight_averaging swa"),
    (Counterpart("train.loss.smoothing"), "label_smoothing label_smoothing_factor"),
    (Counterpart("train.loss.class_weights"), "class_weight pos_weight"),
    # --- evaluation, checkpoints and trackers ---
    (
        Counterpart("train.eval.every", "steps between evaluations"),
        "eval_steps eval_interval eval_every eval_freq eval_frequency val_check_interval "
        "check_val_every_n_epoch evaluation_strategy eval_strategy validation_interval",
    ),
    (
        Counterpart("train.eval.batches"),
        "eval_batches limit_val_batches validation_steps num_eval_steps max_eval_batches",
    ),
    (
        Counterpart("train.checkpoint.every", "steps between saves"),
        "save_steps save_interval save_every save_freq save_strategy checkpoint_every "
        "checkpoint_interval checkpoint_period checkpointing_steps every_n_train_steps",
    ),
    (
        Counterpart("train.checkpoint.keep"),
        "save_total_limit keep_checkpoints max_to_keep keep_last checkpoints_total_limit "
        "keep_checkpoint_max num_checkpoints",
    ),
    (
        Counterpart("train.checkpoint.path", "or leave it out: it is in the run folder"),
        "output_dir save_dir checkpoint_dir checkpoint_path ckpt_dir ckpt_path default_root_dir "
        "output_path logging_dir log_dir",
    ),
    (
        Counterpart("train.checkpoint.best", value="{metric: eval/loss}"),
        "load_best_model_at_end save_best save_best_only metric_for_best_model save_top_k",
    ),
    (
        Counterpart("tracker", value="{name: wandb}"),
        "report_to wandb mlflow loggers logger tensorboard",
    ),
    (Counterpart("tracker.project"), "wandb_project project_name experiment_name"),
    # --- data ---
    (
        Counterpart("train.data.threads", "or train.data.workers, for processes"),
        "num_workers dataloader_num_workers n_workers num_data_workers dataloader_workers",
    ),
    (
        Counterpart("train.data.eval_split", "the share that is held out"),
        "val_split validation_split test_split val_ratio val_size test_size valid_split "
        "validation_ratio val_fraction val_pct",
    ),
    (
        Counterpart("train.data.eval_path"),
        "val_path val_data val_file validation_file validation_data eval_file eval_data test_path "
        "test_file test_data val_dataset eval_dataset_path valid_path validation_path",
    ),
    (
        Counterpart("train.data.path"),
        "train_file train_data train_path data_path dataset_path data_root data_files train_dir "
        "data_folder file files",
    ),
    (Counterpart("train.data.name"), "dataset_name dataset_id tfds_name"),
    (Counterpart("train.data.prefetch"), "prefetch_factor prefetch_batches dataloader_prefetch"),
    (Counterpart("train.data.size"), "image_size img_size resize input_size resolution crop_size"),
    (Counterpart("train.data.augment"), "augmentation augmentations transforms transform augs"),
    (
        Counterpart("train.data.label"),
        "label_column target_column label_col target_col label_key label_name y",
    ),
    (
        Counterpart("train.data.columns"),
        "features feature_columns feature_cols input_columns x_columns inputs",
    ),
    (Counterpart("train.data.field"), "text_column text_field text_key dataset_text_field"),
    (
        Counterpart("train.data.tokenizer"),
        "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_file",
    ),
    (Counterpart("train.data.shuffle"), "shuffle_data shuffle_buffer shuffle_buffer_size"),
    # --- the model ---
    (
        Counterpart("train.model.init_from", "a folder or a URL of a bucket"),
        "model_name model_name_or_path model_id pretrained pretrained_model base_model "
        "from_pretrained pretrained_model_name_or_path model_path init_checkpoint",
    ),
    (
        Counterpart("train.model.length", "tokens of an example"),
        "seq_len seq_length sequence_length max_seq_len max_seq_length max_length context_length "
        "block_size context_size max_sequence_length cutoff_len",
    ),
    (Counterpart("train.model.width"), "hidden_size d_model n_embd embed_dim hidden_dim dim"),
    (
        Counterpart("train.model.layers"),
        "num_layers n_layer n_layers num_hidden_layers depth num_blocks",
    ),
    (Counterpart("train.model.heads"), "num_heads n_head n_heads num_attention_heads"),
    (Counterpart("train.model.kv_heads"), "num_key_value_heads num_kv_heads n_kv_heads"),
    (
        Counterpart("train.model.hidden"),
        "intermediate_size ffn_dim ffn_hidden_size mlp_dim d_ff dim_feedforward",
    ),
    (Counterpart("train.model.vocab"), "vocab_size vocabulary_size n_vocab"),
    (Counterpart("train.model.classes"), "num_classes num_labels n_classes nb_classes"),
    (Counterpart("train.model.dropout"), "dropout_rate dropout_prob p_dropout hidden_dropout_prob"),
    (Counterpart("train.lora", value="{rank: 8}"), "peft use_lora use_peft peft_config qlora"),
    (Counterpart("train.lora.rank"), "lora_r lora_rank lora_dim"),
    (Counterpart("train.lora.alpha"), "lora_alpha"),
    (Counterpart("train.lora.targets"), "target_modules lora_target_modules lora_targets"),
    (Counterpart("train.lora.dropout"), "lora_dropout"),
    (Counterpart("train.lora.base", value="int8"), "load_in_8bit load_in_4bit quantize"),
    # --- the mesh ---
    (
        Counterpart("train.mesh.fsdp"),
        "zero_stage sharding_strategy deepspeed fsdp_size fsdp_config ici_fsdp_parallelism "
        "data_parallel_shard_degree zero",
    ),
    (
        Counterpart("train.mesh.mp"),
        "tensor_parallel tensor_parallel_size tp tp_size tensor_parallel_degree "
        "model_parallel_size tensor_model_parallel_size ici_tensor_parallelism",
    ),
    (
        Counterpart("train.mesh.dp"),
        "data_parallel data_parallel_size dp_size ddp ici_data_parallelism",
    ),
    (Counterpart("train.mesh.ep"), "expert_parallel expert_parallel_size ep_size"),
    # --- devices, hosts and what a pod requests ---
    (
        Counterpart("accelerator.per_host", "the devices of one host"),
        "gpus num_gpus n_gpus ngpus gpu_count gpus_per_node gpus_per_host num_gpus_per_node gres "
        "chips tpus devices num_devices nvidia.com/gpu google.com/tpu devices_per_host",
    ),
    (
        Counterpart("accelerator.type"),
        "gpu gpu_type gpu_name accelerators accelerator_type device device_type tpu tpu_type "
        "instance_type machine_type node_type",
    ),
    (Counterpart("accelerator.topology"), "tpu_topology slice_topology"),
    (
        Counterpart("hosts"),
        "nodes num_nodes nnodes n_nodes node_count replicas world_size parallelism completions "
        "num_hosts num_workers_per_job workers_count machines num_machines",
    ),
    (Counterpart("slices"), "num_slices slice_count"),
    (
        Counterpart("processes_per_host"),
        "nproc_per_node nproc procs_per_node num_processes ntasks_per_node tasks_per_node ntasks "
        "processes processes_per_node",
    ),
    (
        _NO_ADDRESSES,
        "master_addr master_port node_rank rdzv_endpoint rdzv_backend rdzv_id local_rank "
        "coordinator_address machine_rank main_process_ip main_process_port standalone",
    ),
    (Counterpart("resources.cpu"), "cpus cpu num_cpus cpus_per_task cpu_request vcpus"),
    (Counterpart("resources.memory"), "mem ram memory_limit memory_request mem_per_node"),
    (Counterpart("resources.ephemeral"), "disk disk_size disk_space storage_size"),
    (Counterpart("resources.shm"), "shm_size shared_memory"),
    # --- the job ---
    (Counterpart("name"), "job_name title run_name display_name workload wandb_name"),
    (
        Counterpart("image"),
        "docker_image container_image container image_id base_docker_image base_image docker",
    ),
    (
        Counterpart("command", value="[python, train.py]"),
        "run script entrypoint cmd args main program entry_point arguments",
    ),
    (
        Counterpart(None, "install packages in the image; init: has containers that run before."),
        "setup requirements pip pip_packages packages dependencies conda",
    ),
    (Counterpart("workdir"), "working_dir working_directory cwd chdir"),
    (Counterpart("code", "a folder to ship"), "code_dir source_dir repo git src code_path"),
    (Counterpart("env"), "environment envs environment_variables env_vars env_variables envvars"),
    (Counterpart("secrets"), "env_from secret_env"),
    (
        Counterpart("volumes", value="[{claim: data, path: /data}]"),
        "file_mounts mounts storage pvc persistent_volume_claim volume_mounts storage_mounts",
    ),
    (
        Counterpart("restarts.crash"),
        "num_restarts max_restarts max_retries retries backoff_limit restart_policy max_failures "
        "num_retries restart_limit",
    ),
    (
        Counterpart("deadline"),
        "timeout time time_limit walltime max_run_duration active_deadline_seconds max_runtime "
        "max_duration",
    ),
    (Counterpart("ttl"), "ttl_seconds_after_finished ttl_seconds"),
    (Counterpart("grace"), "termination_grace_period_seconds grace_period signal_time"),
    (
        Counterpart("capacity", value="spot", note="or on-demand, flex-start"),
        "spot use_spot preemptible provisioning_model spot_instances on_demand",
    ),
    (Counterpart("capacity.reservation"), "reservation reservation_name"),
    (Counterpart("queue"), "partition queue_name local_queue qos"),
    (Counterpart("priority"), "priority_class priority_class_name"),
    (Counterpart("node_selector"), "selector constraints"),
    (Counterpart("service_account"), "service_account_name"),
    (Counterpart("pod"), "template pod_template pod_spec"),
    (Counterpart("notify.url"), "webhook slack slack_webhook webhook_url email mail_user"),
    (_MANIFEST, "api_version metadata spec status"),
)


def _normalize_word(word: str) -> str:
    return re.sub(r"[-_]", "", word).lower()


def _list_counterparts() -> Iterator[tuple[str, Counterpart]]:
    for counterpart, words in _ROWS:
        for word in words.split():
            yield word, counterpart


# The counterpart of each word.
WORDS = dict(_list_counterparts())
_COUNTERPARTS = {_normalize_word(word): counterpart for word, counterpart in WORDS.items()}


def find_counterpart(word: str) -> Counterpart | None:
    """Return what corresponds to a key of another tool, or None if the word is not known."""
    return _COUNTERPARTS.get(_normalize_word(word))
