"""Settings of verl, TRL, AReaL and slime by their names there, and what they are here. Plain data and its look-up.

A value is `field`, `field, field`, `field: where the meaning differs`, or `not here: why, or what to use instead`. A
name that ends in `.*` stands for all below it. The tables of docs/coming-from.md are `table(system)`, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.config import field_kinds

NOT_HERE = "not here"
WEIGHTS_TRAVEL = "weights.store, rollout.engine.transport: `disk` or `shm`; to servers `disk` or `collective`"

VERL = {
    # data
    "data.train_files": "data.train: several files are a list, [a.parquet, b.parquet]",
    "data.val_files": "data.validation",
    "data.train_batch_size": "groups_per_step: prompts in both",
    "data.gen_batch_size": "not here: prompts are leased one by one, up to `rollout.max_groups` in flight",
    "data.val_batch_size": "validation.slots: answers generated at once",
    "data.max_prompt_length": "data.max_prompt_tokens: nothing is padded to it",
    "data.max_response_length": "sampling.max_new_tokens",
    "data.train_max_samples": "data.max_samples: the first rows of each file, not random ones; all is null, not -1",
    "data.val_max_samples": "data.validation_size: the first rows",
    "data.prompt_key": "data.prompt_key",
    "data.reward_fn_key": "not here: the column is `data_source`; a function with verl's signature gets it",
    "data.shuffle": "data.shuffle",
    "data.seed": "seed",
    "data.filter_overlong_prompts": "data.overlong: true is `drop`, false is `refuse`",
    "data.truncation": "data.overlong: `error` is `refuse`; a prompt is never cut",
    "data.image_key": "not here: text models only",
    "data.trust_remote_code": "not here: no code of a model or data set is ever run",
    "data.custom_cls.path": "data.train: a function that makes rows, `./file.py:function`",
    "data.apply_chat_template_kwargs": "not here: the chat template is rendered as it is",
    # actor
    "actor_rollout_ref.model.path": "model.path: with `model.type=local`",
    "actor_rollout_ref.model.tokenizer_path": "not here: the tokenizer lies in the model's directory",
    "actor_rollout_ref.model.custom_chat_template": "not here: the template lies in the model's directory",
    "actor_rollout_ref.model.trust_remote_code": "not here: no code of a model directory is ever run",
    "actor_rollout_ref.model.lora_rank": "learner.lora.rank: 0 is null",
    "actor_rollout_ref.model.lora_alpha": "learner.lora.alpha",
    "actor_rollout_ref.model.target_modules": "learner.lora.target_modules: all-linear is the empty list",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "learner.recompute",
    "actor_rollout_ref.model.use_remove_padding": "not here: sequences are always packed",
    "actor_rollout_ref.hybrid_engine": "not here: rollout workers and learner are always apart",
    "actor_rollout_ref.actor.strategy": "not here: one process, and FSDP2 from `learner.ranks=2` on",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "learner.minibatch_groups: prompts in both (verl multiplies by n)",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "learner.token_budget: tokens, not answers",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.token_budget",
    "actor_rollout_ref.actor.use_dynamic_bsz": "not here: micro-batches are always filled by tokens",
    "actor_rollout_ref.actor.use_prefix_grouper": "learner.share_prefixes: on unless set, with any other setting",
    "actor_rollout_ref.actor.ppo_epochs": "learner.passes",
    "actor_rollout_ref.actor.clip_ratio": "learner.loss.clip_low, learner.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "learner.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "learner.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "learner.loss.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "learner.loss.aggregation: same names with underscores, `token_mean`",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "learner.loss.name: `vanilla` is `ppo_clip`, `geo_mean` is "
                                                     "`gmpo`; others by their names",
    "actor_rollout_ref.actor.entropy_coeff": "learner.loss.entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": "learner.kl.use: true is `loss`",
    "actor_rollout_ref.actor.kl_loss_coef": "learner.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "learner.kl.estimator: `low_var_kl` is `k3`, `mse` is `k2`, `abs` is "
                                            "`abs`; `kl` is `k1`, refused in the loss: `k1+`",
    "actor_rollout_ref.actor.use_rollout_log_probs": "learner.correction.mode: true is `bypass`",
    "actor_rollout_ref.actor.optim.lr": "learner.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "learner.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "learner.warmup_steps: steps, not a share",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "learner.decay: `constant` or `cosine`; also `linear`",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "learner.final_lr_ratio",
    "actor_rollout_ref.actor.optim.total_training_steps": "learner.decay_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "learner.betas",
    "actor_rollout_ref.actor.optim.clip_grad": "learner.max_grad_norm",
    "actor_rollout_ref.actor.grad_clip": "learner.max_grad_norm",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "learner.ranks",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "not here: nothing is moved to the host between phases",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "not here: nothing is moved to the host between phases",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "not here: parameters are float32; `learner.dtype` is the "
                                                       "compute",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "not here: a sequence is on one rank",
    "actor_rollout_ref.actor.use_torch_compile": "not here: nothing is compiled",
    "actor_rollout_ref.ref.*": "learner.reference.path: on the learner's ranks, with its dtype and token budget",
    # rollout
    "actor_rollout_ref.rollout.name": "rollout.engine.type: `sglang`, or `torch`, the embedded engine; no vLLM",
    "actor_rollout_ref.rollout.mode": "not here: rollout is always asynchronous; `staleness.bound=0` is on-policy",
    "actor_rollout_ref.rollout.n": "group_size",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p: training samples the whole distribution, 1.0",
    "actor_rollout_ref.rollout.top_k": "sampling.top_k: 0 is all, not -1; training samples the whole distribution",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_tokens",
    "actor_rollout_ref.rollout.response_length": "sampling.max_new_tokens",
    "actor_rollout_ref.rollout.dtype": "rollout.engine.dtype",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.engine.slots",
    "actor_rollout_ref.rollout.max_model_len": "not here: the longest prompt with `sampling.max_new_tokens` must fit",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.engine.server_args: of engine `sglang`, "
                                                        "--mem-fraction-static; `slots` bounds an embedded one",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.engine.tensor_parallel: of engine `sglang`; an "
                                                            "embedded one has one device",
    "actor_rollout_ref.rollout.nnodes": "rollout.workers: engines, one on each GPU",
    "actor_rollout_ref.rollout.enforce_eager": "not here: no graphs are captured",
    "actor_rollout_ref.rollout.calculate_log_probs": "not here: always recorded",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "learner.token_budget: tokens, not answers",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "learner.token_budget",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": WEIGHTS_TRAVEL,
    "actor_rollout_ref.rollout.multi_turn.*": "rollout.session: a function of yours says what the model is asked next",
    "actor_rollout_ref.rollout.agent.*": "rollout.session: a function of yours says what the model is asked next",
    "actor_rollout_ref.rollout.val_kwargs.n": "validation.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "validation.temperature: of the sampled answers; greedy ones "
                                                        "come beside",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "validation.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "validation.top_k: 0 is all, not -1",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "validation.sampled: beside greedy answers, not instead",
    # algorithm and reward
    "algorithm.adv_estimator": "learner.advantage.name: by the same names",
    "algorithm.norm_adv_by_std_in_grpo": "learner.advantage.normalize_by_std",
    "algorithm.gamma": "learner.advantage.gamma: of `gae` and `reinforce_plus_plus`",
    "algorithm.lam": "learner.advantage.lam: of `gae`",
    "algorithm.use_kl_in_reward": "learner.kl.use: true is `reward`",
    "algorithm.kl_penalty": "learner.kl.estimator: `kl` is `k1`, `mse` is `k2`, `low_var_kl` is `k3`, `abs` is `abs`",
    "algorithm.kl_ctrl.kl_coef": "learner.kl.coef",
    "algorithm.filter_groups.enable": "rollout.no_spread: true is `drop`; judged on the reward",
    "algorithm.filter_groups.metric": "rollout.group_filter: a function sees rewards, parts and correctness of a group",
    "algorithm.filter_groups.max_num_gen_batches": "failure.barren_groups: groups in a row without a usable one",
    "algorithm.rollout_correction.rollout_is": "learner.correction.weights: `token` is `token_truncate`, `sequence` is"
                                               " `sequence_truncate`, null is `none`",
    "algorithm.rollout_correction.rollout_is_threshold": "learner.correction.cap",
    "algorithm.rollout_correction.rollout_rs": "learner.correction.rejection: rules by the same names; a band [a, b] "
                                               "is [1/b, 1/a]",
    "algorithm.rollout_correction.bypass_mode": "learner.correction.mode: true is `bypass`",
    "reward.custom_reward_function.path": "reward: path and name in one, `./file.py:function`",
    "reward.custom_reward_function.name": "reward: path and name in one, `./file.py:function`",
    "reward.reward_manager.name": "reward: a built-in name, or a function",
    "reward.num_workers": "scoring.workers: for each rollout worker",
    "reward.reward_model.*": "scoring.model.path: with `reward=reward_model`; a generative one is `reward=judge`",
    "reward_model.*": "scoring.model.path: with `reward=reward_model`; a generative one is `reward=judge`",
    "reward.sandbox_fusion.*": "reward: `code` runs programs in a sandbox of its own, on the worker's machine",
    "critic.*": "learner.critic.lr, learner.critic.path: over the minibatches of the policy, on the learner's ranks",
    # trainer
    "trainer.total_epochs": "data.epochs",
    "trainer.total_training_steps": "total_steps",
    "trainer.save_freq": "checkpoint.every: one is always made at the end; -1 (never) is not here",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.test_freq": "validation.every: -1 (never) is `data.validation=null`",
    "trainer.val_before_train": "not here: there is always a validation before the first step",
    "trainer.val_only": "validation.only",
    "trainer.log_val_generations": "validation.table",
    "trainer.validation_data_dir": "not here: a sample table lies beside every validation",
    "trainer.rollout_data_dir": "not here: every group is a row on disk before it is trained; `headway inspect`",
    "trainer.project_name": "tracking.experiment",
    "trainer.experiment_name": "not here: `--run-key` names the run",
    "trainer.logger": "not here: MLflow, always; `tracking.uri` says where",
    "trainer.nnodes": "learner.ranks: the GPUs of one host",
    "trainer.n_gpus_per_node": "learner.ranks: all of them",
    "trainer.device": "learner.device, rollout.engine.device",
    "trainer.resume_mode": "not here: the same command with the same `--run-key` goes on",
    "trainer.resume_from_path": "not here: the same command with the same `--run-key` goes on",
    "trainer.default_local_dir": "not here: runs lie under HEADWAY_HOME, by their `--run-key`",
    "trainer.balance_batch": "not here: ranks are always balanced by tokens",
    "trainer.critic_warmup": "learner.critic.warmup_steps",
    "trainer.v1.separate_async.parameter_sync_step": "publish_every",
    "trainer.v1.sampler.max_off_policy_threshold": "staleness.bound: there the newest weights have age 1, here 0",
    "trainer.v1.sampler.max_off_policy_strategy": "staleness.policy: `drop` and `wait`; also `keep` and `mask`",
    # fully asynchronous
    "async_training.staleness_threshold": "staleness.bound: the same budget of (1 + s) steps ahead; here the age is "
                                          "judged again when a group is consumed",
    "async_training.trigger_parameter_sync_step": "publish_every",
    "async_training.require_batches": "groups_per_step: require_batches x ppo_mini_batch_size",
    "async_training.partial_rollout": "not here: weights are always swapped under running answers; every token knows "
                                      "its version",
    "async_training.use_trainer_do_validate": "validation.engine: `embedded`, an engine of its own, or "
                                              "`replica`, one of the servers",
    "rollout.total_rollout_steps": "total_steps: prompts there; divide by groups_per_step",
    "rollout.n": "group_size",
    "rollout.nnodes": "rollout.workers: engines, one on each GPU",
    "rollout.n_gpus_per_node": "rollout.workers: engines, one on each GPU",
    "rollout.max_concurrent_samples_per_replica": "rollout.max_groups: prompts in flight over all workers",
    "async_training.concurrent_samples_per_replica": "rollout.max_groups: prompts in flight over all workers",
}

TRL = {
    "learning_rate": "learner.lr",
    "num_generations": "group_size",
    "num_generations_eval": "validation.n",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens: longer ones are refused or dropped (`data.overlong`), never cut",
    "per_device_train_batch_size": "groups_per_step: answers there, prompts here: per device x devices x accumulation "
                                   "/ num_generations",
    "gradient_accumulation_steps": "learner.token_budget: micro-batches are cut by tokens; the step is groups_per_step",
    "generation_batch_size": "groups_per_step: answers there, prompts here",
    "steps_per_generation": "learner.minibatch_groups: groups of one update, not the number of updates",
    "num_iterations": "learner.passes",
    "num_train_epochs": "data.epochs",
    "max_steps": "total_steps: one step is one batch of groups_per_step, however many updates it makes",
    "per_device_eval_batch_size": "validation.slots: answers generated at once",
    "epsilon": "learner.loss.clip_low, learner.loss.clip_high: without `epsilon_high` it is both",
    "epsilon_high": "learner.loss.clip_high: of `cispo` it is `learner.loss.ratio_high`, the bound itself",
    "delta": "learner.loss.delta: the dual clip is off with `learner.loss.dual_clip=null`, as there",
    "beta": "learner.kl.coef: with `learner.kl.use=loss`",
    "use_bias_correction_kl": "learner.kl.unbiased: with `learner.kl.estimator=k3+`; false is `k3`, not weighted",
    "loss_type": "learner.loss.aggregation: `dapo` is `token_mean`, `grpo` `seq_mean_token_mean`, `dr_grpo` "
                 "`seq_mean_token_sum_norm`; `cispo` and `sapo` are losses, `luspo` is the loss `gspo` with "
                 "`seq_mean_token_sum`; `bnpo` and `vespo` are not here",
    "sapo_temperature_pos": "learner.loss.tau_positive",
    "sapo_temperature_neg": "learner.loss.tau_negative",
    "scale_rewards": "learner.advantage.normalize_by_std: `group` is true, `none` false; `batch` is the estimator "
                     "`lite_ppo`",
    "multi_objective_aggregation": "learner.advantage.name: `normalize_then_sum` is `gdpo`",
    "importance_sampling_level": "learner.loss.name: `sequence` is `gspo`",
    "mask_truncated_completions": "learner.loss.truncated: true is `mask`",
    "vllm_importance_sampling_correction": "learner.correction.weights: false is `none`",
    "vllm_importance_sampling_mode": "learner.correction.weights: `token_truncate` and `sequence_truncate` are here; "
                                     "for the masks, `token_icepop` and `sequence_icepop`",
    "vllm_importance_sampling_cap": "learner.correction.cap: 2.0 unless set, there 3.0",
    "vllm_importance_sampling_clip_max": "learner.correction.cap, learner.correction.icepop_high: 2.0 and 5.0 unless "
                                         "set, there 3.0",
    "vllm_importance_sampling_clip_min": "learner.correction.icepop_low: 0.5 unless set, there none; truncation has no "
                                         "lower bound here",
    "off_policy_mask_threshold": "learner.loss.opsm_delta: of the loss `opsm`",
    "top_entropy_quantile": "learner.loss.top_entropy_quantile",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p: training samples the whole distribution, 1.0",
    "top_k": "sampling.top_k: training samples the whole distribution, 0",
    "min_p": "sampling.min_p: training samples the whole distribution, 0",
    "repetition_penalty": "not here: the learner's log-probs are of the plain distribution",
    "generation_kwargs": "not here: `sampling` has all that training rollouts may set",
    "chat_template_kwargs": "not here: the chat template is rendered as it is",
    "shuffle_dataset": "data.shuffle",
    "seed": "seed",
    "data_seed": "seed",
    "warmup_steps": "learner.warmup_steps",
    "warmup_ratio": "learner.warmup_steps: steps, not a share",
    "lr_scheduler_type": "learner.decay: `constant`, `linear`, `cosine`, each after learner.warmup_steps",
    "adam_beta1": "learner.betas: both, as [0.9, 0.95]",
    "adam_beta2": "learner.betas: both, as [0.9, 0.95]",
    "adam_epsilon": "learner.adam_eps",
    "weight_decay": "learner.weight_decay",
    "max_grad_norm": "learner.max_grad_norm",
    "optim": "not here: always AdamW",
    "bf16": "learner.dtype: true is `bfloat16`; parameters and sums stay float32",
    "fp16": "not here: float32 or bfloat16 (`learner.dtype`)",
    "gradient_checkpointing": "learner.recompute",
    "use_liger_kernel": "learner.logits_chunk: logits are never held for more rows than this",
    "disable_dropout": "not here: there is no dropout",
    "model_name_or_path": "model.path: with `model.type=local`; `hf:owner/name` for the hub",
    "use_peft": "learner.lora.rank: null is false",
    "lora_r": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    "lora_dropout": "learner.lora.dropout: must be 0, log-probs are of the distribution that samples",
    "lora_target_modules": "learner.lora.target_modules: all-linear is the empty list",
    "model_init_kwargs": "not here: the directory says what the model is; `learner.dtype` is the compute",
    "dataset_name": "data.train: `hf:owner/name[:split]` for the hub",
    "train_dataset": "data.train",
    "eval_dataset": "data.validation",
    "reward_funcs": "reward, scoring.parts: one function or named parts with weights; TRL's signature is understood",
    "reward_weights": "scoring.parts: each further reward has its weight; that of `reward` is `scoring.weight`",
    "use_vllm": "rollout.engine.type: `sglang`, or `torch`, the embedded engine; no vLLM",
    "vllm_mode": "rollout.engine.type: the engine is in rollout workers of its own, or servers; no vLLM",
    "vllm_gpu_memory_utilization": "rollout.engine.server_args: of engine `sglang`, --mem-fraction-static; `slots` "
                                   "bounds an embedded one",
    "vllm_tensor_parallel_size": "rollout.engine.tensor_parallel: of engine `sglang`; an embedded one has one device",
    "vllm_server_base_url": "rollout.engine.urls: of engine `sglang`; no vLLM",
    "use_transformers_paged": "not here: the engine batches continuously, always",
    "use_transformers_continuous_batching": "not here: the engine batches continuously, always",
    "sync_ref_model": "learner.reference.refresh_every: its alpha is `learner.reference.refresh_mix`",
    "deepspeed": "learner.ranks: FSDP2 from 2 on",
    "fsdp": "learner.ranks: FSDP2 from 2 on",
    "use_cpu": "learner.device, rollout.engine.device",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "validation.every",
    "eval_strategy": "validation.every: `no` is `data.validation=null`",
    "eval_on_start": "not here: there is always a validation before the first step",
    "metric_for_best_model": "checkpoint.best: a field of the validation's record; the checkpoint is kept",
    "load_best_model_at_end": "checkpoint.best: `headway export` takes it out",
    "resume_from_checkpoint": "not here: the same command with the same `--run-key` goes on",
    "output_dir": "not here: runs lie under HEADWAY_HOME, by their `--run-key`",
    "run_name": "not here: `--run-key` names the run",
    "project": "tracking.experiment",
    "report_to": "not here: MLflow, always; `tracking.uri` says where",
    "logging_steps": "not here: every step is recorded",
    "log_completions": "not here: every answer is on disk; `headway inspect`",
    "push_to_hub": "not here: `headway export` writes a Hugging Face directory",
    # AsyncGRPOConfig
    "max_staleness": "staleness.bound: publications in both; what is over it goes by `staleness.policy`",
    "weight_sync_steps": "publish_every",
    "max_inflight_tasks": "rollout.max_groups: prompts here, answers there; null is derived",
    "queue_maxsize": "not here: follows from `staleness.bound`; finished groups wait on disk",
    "request_timeout": "deadlines.group_s: of a whole group",
}

AREAL = {
    "experiment_name": "tracking.experiment",
    "trial_name": "not here: `--run-key` names the run",
    "seed": "seed",
    "total_train_epochs": "data.epochs",
    "total_train_steps": "total_steps",
    "total_train_n_seqs": "total_steps: answers there; divide by groups_per_step x group_size",
    "tokenizer_path": "not here: the tokenizer lies in the model's directory",
    "allocation_mode": "learner.ranks, rollout.workers",
    "dynamic_bs": "not here: a step has groups_per_step groups, always",
    "enable_offload": "not here: nothing is moved to the host between phases",
    "cluster.n_nodes": "not here: one host; the GPUs of a role are `learner.ranks` and `rollout.workers`",
    "cluster.n_gpus_per_node": "not here: the GPUs of a role are `learner.ranks` and `rollout.workers`",
    "cluster.fileroot": "not here: runs lie under HEADWAY_HOME, by their `--run-key`",
    "cluster.name_resolve.*": "not here: Ray finds its actors by name",
    "scheduler.type": "not here: always Ray",
    # rollout
    "rollout.backend": "rollout.engine.replicas: `sglang:d4` is `rollout.engine.type=sglang` and 4",
    "rollout.max_head_offpolicyness": "staleness.bound: admitted by the same rule, and judged again when consumed",
    "rollout.max_concurrent_rollouts": "rollout.max_groups: prompts with all their answers in both",
    "rollout.consumer_batch_size": "groups_per_step",
    "rollout.queue_size": "not here: follows from `staleness.bound`; finished groups wait on disk",
    "rollout.request_timeout": "deadlines.group_s: of a whole group",
    "rollout.request_retries": "failure.trajectory_tries: tries, not retries",
    "rollout.setup_timeout": "deadlines.actor_start_s",
    "rollout.dump_to_file": "not here: every group is a row on disk before it is trained; `headway inspect`",
    "rollout.enable_rollout_tracing": "not here: `headway status` and the logs of the run",
    "rollout.use_lora": "learner.lora.publish: what engines are given, all weights or the adapter alone",
    "rollout.agent.*": "rollout.session: a function of yours says what the model is asked next",
    "gconfig.n_samples": "group_size",
    "gconfig.max_new_tokens": "sampling.max_new_tokens",
    "gconfig.min_new_tokens": "not here: the learner's log-probs are of the plain distribution",
    "gconfig.max_tokens": "not here: the longest prompt with `sampling.max_new_tokens` must fit",
    "gconfig.greedy": "not here: training samples; validation is greedy, and sampled beside",
    "gconfig.temperature": "sampling.temperature",
    "gconfig.top_p": "sampling.top_p: training samples the whole distribution, 1.0",
    "gconfig.top_k": "sampling.top_k: training samples the whole distribution, 0",
    "gconfig.stop": "sampling.stop",
    "gconfig.stop_token_ids": "sampling.stop_token_ids",
    "gconfig.frequency_penalty": "not here: the learner's log-probs are of the plain distribution",
    "eval_gconfig.n_samples": "validation.n",
    "eval_gconfig.temperature": "validation.temperature",
    "eval_gconfig.top_p": "validation.top_p",
    "eval_gconfig.top_k": "validation.top_k",
    "eval_gconfig.max_new_tokens": "validation.max_new_tokens",
    "eval_gconfig.greedy": "validation.sampled: greedy answers are always there; false leaves out the sampled ones",
    # actor
    "actor.path": "model.path: with `model.type=local`",
    "actor.backend": "learner.ranks: `fsdp:d4` is 4",
    "actor.dtype": "learner.dtype",
    "actor.optimizer_dtype": "not here: parameters and optimizer are float32",
    "actor.gradient_checkpointing": "learner.recompute",
    "actor.disable_dropout": "not here: there is no dropout",
    "actor.attn_impl": "not here: the attention of packed sequences is Headway's",
    "actor.use_lora": "learner.lora.rank: null is false",
    "actor.lora_rank": "learner.lora.rank",
    "actor.lora_alpha": "learner.lora.alpha",
    "actor.target_modules": "learner.lora.target_modules: all-linear is the empty list",
    "actor.init_from_scratch": "not here: a directory with weights; the tiny model has `model.warmup_steps=0`",
    "actor.mb_spec.max_tokens_per_mb": "learner.token_budget",
    "actor.mb_spec.n_mbs": "not here: as many micro-batches as `learner.token_budget` makes",
    "actor.enable_tree_training": "learner.share_prefixes: prompts are shared, not parts of answers",
    "actor.weight_update_mode": WEIGHTS_TRAVEL,
    "actor.optimizer.type": "not here: always AdamW",
    "actor.optimizer.lr": "learner.lr",
    "actor.optimizer.weight_decay": "learner.weight_decay",
    "actor.optimizer.beta1": "learner.betas: both, as [0.9, 0.95]",
    "actor.optimizer.beta2": "learner.betas: both, as [0.9, 0.95]",
    "actor.optimizer.eps": "learner.adam_eps",
    "actor.optimizer.lr_scheduler_type": "learner.decay",
    "actor.optimizer.warmup_steps_proportion": "learner.warmup_steps: steps, not a share",
    "actor.optimizer.min_lr_ratio": "learner.final_lr_ratio",
    "actor.optimizer.gradient_clipping": "learner.max_grad_norm",
    "actor.ppo_n_minibatches": "learner.minibatch_groups: groups of one, not how many: groups_per_step / n",
    "actor.eps_clip": "learner.loss.clip_low, learner.loss.clip_high: without `eps_clip_higher` it is both",
    "actor.eps_clip_higher": "learner.loss.clip_high",
    "actor.c_clip": "learner.loss.dual_clip: 3.0 unless set, null is off",
    "actor.temperature": "sampling.temperature",
    "actor.max_new_tokens": "sampling.max_new_tokens",
    "actor.use_decoupled_loss": "learner.loss.name: true is `decoupled_ppo`, which always has its token weights, cut "
                                "at 5",
    "actor.prox_logp_method": "learner.loss.proximal: `recompute` and `loglinear`",
    "actor.recompute_logprob": "learner.correction.mode: false is `bypass`",
    "actor.rejection_sampling.action": "learner.correction.weights: `clamp` by token is `token_truncate`; `mask` is a "
                                       "rule of `learner.correction.rejection`",
    "actor.rejection_sampling.upper": "learner.correction.cap",
    "actor.rejection_sampling.*": "learner.correction.rejection: rules with bounds on the ratio, or on k2 and k3",
    "actor.behave_imp_weight_cap": "learner.correction.cap: of `ppo_clip` with `learner.correction.weights="
                                   "token_truncate`, the same loss; `decoupled_ppo` has 5",
    "actor.importance_sampling_level": "learner.loss.name: `sequence` is `gspo`",
    "actor.use_sapo_loss": "learner.loss.name: true is `sapo`",
    "actor.m2_threshold": "learner.loss.tau: of the loss `m2po`",
    "actor.reward_norm.std_level": "learner.advantage.normalize_by_std: `group` is true, null false; `batch` is the "
                                   "estimator `lite_ppo`",
    "actor.reward_norm.mean_level": "not here: the mean is the group's, always",
    "actor.reward_norm.group_size": "group_size",
    "actor.adv_norm.std_level": "learner.advantage.normalize_by_std: `group` is true, null false; `batch` is the "
                                "estimator `lite_ppo`",
    "actor.adv_norm.mean_level": "not here: the mean is the group's, always",
    "actor.adv_norm.mean_leave1out": "learner.advantage.name: true is `rloo`",
    "actor.adv_norm.eps": "learner.advantage.eps: 1e-6 unless set, there 1e-5",
    "actor.reward_scaling": "scoring.weight: the group's deviation takes it out again",
    "actor.reward_bias": "not here: the group's mean takes it out again",
    "actor.reward_clip": "not here: clip in the reward",
    "actor.overlong_reward_penalty": "learner.loss.truncated: true is `penalty`, with `learner.loss.overlong_buffer` "
                                     "and `learner.loss.overlong_factor`",
    "actor.mask_no_eos_with_zero": "learner.loss.truncated: true is `mask`",
    "actor.discount": "learner.advantage.gamma: of `gae` and `reinforce_plus_plus`",
    "actor.gae_lambda": "learner.advantage.lam: of `gae`",
    "actor.kl_ctl": "learner.kl.coef: with `learner.kl.use=reward`",
    "actor.kl_estimator": "learner.kl.estimator",
    "ref.*": "learner.reference.path: on the learner's ranks, with its dtype and token budget",
    "critic.*": "learner.critic.lr, learner.critic.path: over the minibatches of the policy, on the learner's ranks",
    # data, saving, engines
    "train_dataset.path": "data.train",
    "train_dataset.split": "data.train: `hf:owner/name:split`",
    "train_dataset.batch_size": "groups_per_step: prompts in both",
    "train_dataset.shuffle": "data.shuffle",
    "train_dataset.max_length": "data.max_prompt_tokens: of the prompt; longer ones go by `data.overlong`",
    "train_dataset.type": "not here: rows have a prompt and an answer",
    "valid_dataset.path": "data.validation",
    "valid_dataset.batch_size": "validation.slots: answers generated at once",
    "saver.freq_steps": "checkpoint.every: `headway export` makes a Hugging Face directory of one",
    "saver.freq_epochs": "checkpoint.every: training steps",
    "saver.freq_secs": "checkpoint.every: training steps",
    "recover.mode": "not here: the same command with the same `--run-key` goes on, always",
    "recover.freq_steps": "checkpoint.every",
    "recover.freq_secs": "checkpoint.every: training steps",
    "recover.retries": "failure.worker_restarts, failure.learner_restarts: of actors inside one attempt",
    "evaluator.freq_steps": "validation.every",
    "evaluator.freq_epochs": "validation.every: training steps",
    "evaluator.eval_before_train": "not here: there is always a validation before the first step",
    "stats_logger.*": "not here: MLflow, always; `tracking.uri` says where",
    "perf_tracer.*": "not here: times and utilisation are in every record",
    "sglang.max_running_requests": "rollout.engine.max_running",
    "sglang.dtype": "rollout.engine.dtype",
    "sglang.context_length": "not here: the longest prompt with `sampling.max_new_tokens` must fit",
    "sglang.mem_fraction_static": "rollout.engine.server_args: as the flag --mem-fraction-static",
    "sglang.*": "rollout.engine.server_args: as flags",
    "vllm.max_num_seqs": "rollout.engine.slots",
    "vllm.dtype": "rollout.engine.dtype",
    "vllm.*": "rollout.engine.type: `sglang`, or `torch`, the embedded engine; no vLLM",
}

SLIME = {
    # cluster and model
    "--hf-checkpoint": "model.path: with `model.type=local`",
    "--load": "not here: the same command with the same `--run-key` goes on",
    "--ref-load": "learner.reference.path: null is the initial model",
    "--save": "not here: runs lie under HEADWAY_HOME, by their `--run-key`",
    "--save-hf": "not here: `headway export` writes a Hugging Face directory",
    "--save-interval": "checkpoint.every",
    "--actor-num-nodes": "learner.ranks: the GPUs of one host",
    "--actor-num-gpus-per-node": "learner.ranks: all of them",
    "--rollout-num-gpus": "rollout.workers: engines, one on each GPU",
    "--rollout-num-gpus-per-engine": "rollout.engine.tensor_parallel: of engine `sglang`; an embedded one has one "
                                     "device",
    "--colocate": "not here: rollout workers and learner are always apart",
    "--offload": "not here: nothing is moved to the host between phases",
    "--tensor-model-parallel-size": "not here: FSDP2 over `learner.ranks`",
    "--pipeline-model-parallel-size": "not here: FSDP2 over `learner.ranks`",
    "--context-parallel-size": "not here: a sequence is on one rank",
    "--expert-model-parallel-size": "not here: no expert parallelism; such models are trained, with a warning",
    "--sequence-parallel": "not here: a sequence is on one rank",
    "--recompute-granularity": "learner.recompute: `full` is true, always of one block at a time",
    "--attention-dropout": "not here: there is no dropout",
    "--sglang-mem-fraction-static": "rollout.engine.server_args: as the flag --mem-fraction-static",
    "--sglang-server-concurrency": "rollout.engine.max_running",
    # data
    "--prompt-data": "data.train",
    "--input-key": "data.prompt_key",
    "--label-key": "data.answer_key",
    "--metadata-key": "not here: all other columns reach the reward by name",
    "--apply-chat-template": "not here: a text or a chat always goes through the model's template",
    "--apply-chat-template-kwargs": "not here: the chat template is rendered as it is",
    "--multimodal-keys": "not here: text models only",
    "--tool-key": "not here: no tools; what a prompt is asked behind its answer is `rollout.session`",
    "--data-source-path": "data.train: a function that makes rows, `./file.py:function`",
    "--rollout-shuffle": "data.shuffle: true unless set",
    "--rollout-seed": "seed",
    "--seed": "seed",
    "--rollout-max-prompt-len": "data.max_prompt_tokens: longer ones are dropped with `data.overlong=drop`",
    # rollout
    "--num-rollout": "total_steps",
    "--num-epoch": "data.epochs",
    "--rollout-batch-size": "groups_per_step: prompts in both",
    "--n-samples-per-prompt": "group_size",
    "--global-batch-size": "learner.minibatch_groups: answers there, prompts here: divide by group_size",
    "--num-steps-per-rollout": "learner.minibatch_groups: groups of one update, not how many: groups_per_step / n",
    "--micro-batch-size": "learner.token_budget: tokens, not answers",
    "--use-dynamic-batch-size": "not here: micro-batches are always filled by tokens",
    "--max-tokens-per-gpu": "learner.token_budget",
    "--log-probs-max-tokens-per-gpu": "learner.token_budget",
    "--log-probs-chunk-size": "learner.logits_chunk",
    "--balance-data": "not here: ranks are always balanced by tokens",
    "--rollout-temperature": "sampling.temperature",
    "--rollout-top-p": "sampling.top_p: training samples the whole distribution, 1.0",
    "--rollout-top-k": "sampling.top_k: 0 is all, not -1; training samples the whole distribution",
    "--rollout-max-response-len": "sampling.max_new_tokens",
    "--rollout-max-context-len": "not here: the longest prompt with `sampling.max_new_tokens` must fit",
    "--rollout-stop": "sampling.stop",
    "--rollout-stop-token-ids": "sampling.stop_token_ids",
    "--rollout-function-path": "not here: rollout is always asynchronous; `staleness.bound=0` is on-policy",
    "--custom-generate-function-path": "rollout.session: a function of yours says what the model is asked next",
    "--over-sampling-batch-size": "rollout.max_groups: prompts in flight over all workers",
    "--dynamic-sampling-filter-path": "rollout.group_filter: in another signature; check_reward_nonzero_std is "
                                      "`rollout.no_spread=drop`",
    "--partial-rollout": "not here: weights are always swapped under running answers; every token knows its version",
    "--mask-offpolicy-in-partial-rollout": "staleness.policy: `mask`, for tokens over the bound",
    "--buffer-sort-by-staleness": "not here: the oldest groups are always consumed first",
    "--update-weights-interval": "publish_every",
    "--update-weight-transport": WEIGHTS_TRAVEL,
    "--rollout-health-check-timeout": "deadlines.call_s",
    "--use-fault-tolerance": "failure.worker_restarts: always on",
    # reward
    "--rm-type": "reward: a built-in name",
    "--custom-rm-path": "reward: `./file.py:function` or `package.module:function`",
    "--reward-key": "not here: in a dict, `score` or `reward` is the reward",
    "--group-rm": "not here: answers are scored one by one",
    "--rm-url": "scoring.judge.url: with `reward=judge`; a classifier of your own is `reward=reward_model`",
    # algorithm
    "--advantage-estimator": "learner.advantage.name: `grpo`, `gspo` is `grpo` with the loss `gspo`; "
                             "`reinforce_plus_plus` and its baseline by their names",
    "--disable-grpo-std-normalization": "learner.advantage.normalize_by_std: the flag is false",
    "--normalize-advantages": "learner.advantage.name: `reinforce_plus_plus_baseline` whitens over the claim",
    "--eps-clip": "learner.loss.clip_low, learner.loss.clip_high: without `--eps-clip-high` it is both",
    "--eps-clip-high": "learner.loss.clip_high",
    "--eps-clip-c": "learner.loss.dual_clip: 3.0 unless set, null is off",
    "--loss-type": "learner.loss.name: `policy_loss` is `ppo_clip`",
    "--custom-loss-function-path": "learner.loss.path: with `learner.loss.name=function`, in another signature",
    "--calculate-per-token-loss": "learner.loss.aggregation: set is `token_mean`, unset `seq_mean_token_mean`",
    "--entropy-coef": "learner.loss.entropy_coef",
    "--use-kl-loss": "learner.kl.use: true is `loss`",
    "--kl-loss-coef": "learner.kl.coef: with `learner.kl.use=loss`",
    "--kl-loss-type": "learner.kl.estimator: `low_var_kl` is `k3`",
    "--kl-coef": "learner.kl.coef: with `learner.kl.use=reward`",
    "--gamma": "learner.advantage.gamma: of `gae` and `reinforce_plus_plus`",
    "--lambd": "learner.advantage.lam: of `gae`",
    "--use-tis": "learner.correction.weights: `token_truncate`",
    "--tis-clip": "learner.correction.cap",
    "--tis-clip-low": "learner.correction.icepop_low: of the weights `token_icepop`; `token_truncate` cuts above only",
    "--use-rollout-logprobs": "learner.correction.mode: the flag is `bypass`",
    "--use-opsm": "learner.loss.name: the flag is `opsm`, with `learner.loss.opsm_delta`",
    "--use-opd": "learner.teacher.use: `advantage`, with a directory as `learner.teacher.path`",
    # optimizer
    "--optimizer": "not here: always AdamW",
    "--lr": "learner.lr",
    "--min-lr": "learner.final_lr_ratio: a share of the peak",
    "--lr-decay-style": "learner.decay",
    "--lr-warmup-iters": "learner.warmup_steps",
    "--lr-decay-iters": "learner.decay_steps",
    "--weight-decay": "learner.weight_decay",
    "--adam-beta1": "learner.betas: both, as [0.9, 0.95]",
    "--adam-beta2": "learner.betas: both, as [0.9, 0.95]",
    "--adam-eps": "learner.adam_eps",
    "--clip-grad": "learner.max_grad_norm",
    # validation and tracking
    "--eval-interval": "validation.every",
    "--eval-prompt-data": "data.validation: paths without names",
    "--n-samples-per-eval-prompt": "validation.n",
    "--eval-max-response-len": "validation.max_new_tokens",
    "--eval-temperature": "validation.temperature",
    "--eval-top-p": "validation.top_p",
    "--eval-top-k": "validation.top_k",
    "--skip-eval-before-train": "not here: there is always a validation before the first step",
    "--use-wandb": "not here: MLflow, always; `tracking.uri` says where",
    "--wandb-project": "tracking.experiment",
    "--wandb-group": "not here: `--run-key` names the run",
    "--use-tensorboard": "not here: MLflow, always; `tracking.uri` says where",
    "--save-debug-rollout-data": "not here: every group is a row on disk before it is trained; `headway inspect`",
}

FOREIGN_KEYS = {"verl": VERL, "TRL": TRL, "AReaL": AREAL, "slime": SLIME}
"""By the system's name as it writes it, in the order of docs/coming-from.md."""


@dataclass(frozen=True, slots=True)
class Ours:
    """What one of their settings is here: `Ours(("learner.betas",), "both, as [0.9, 0.95]")`."""

    fields: tuple[str, ...]
    """Of Config, by dotted name; empty where there is none."""
    note: str
    """Where the meaning differs, or why it is not here."""


def ours(text: str) -> Ours:
    """A value of the tables, read: `"learner.lr"` -> `Ours(("learner.lr",), "")`."""
    head, _, note = text.partition(": ")
    return Ours(() if head == NOT_HERE else tuple(head.split(", ")), note)


def answer(key: str) -> str | None:
    """What to tell somebody who sets `key`, in any spelling of a system that we know; None for a key of none.

    Found as it stands, else below another root (`actor.optim.lr`, `config.actor_rollout_ref.actor.optim.lr`), else
    among the `.*`, else a name without dots behind a root of one's own (`learner.num_generations`). Where that finds
    different things, nothing is said, but what a system calls exactly so is said for each of them.
    """
    name = _plain(key)
    exact = {text: system for system, theirs, text in _BY_PLAIN_NAME if theirs == name}
    if len({ours(text).fields for text in exact}) > 1:
        return "unknown here; " + "; ".join(f"{system}'s is {_here(text)}" for text, system in exact.items())
    for tier in (_equal, _below_another_root, _among_all_below, _flat):
        texts = {text for _, theirs, text in _BY_PLAIN_NAME if tier(theirs, name)}
        if texts:
            agree = len({ours(text).fields for text in texts}) == 1 and (len(texts) == 1 or ours(min(texts)).fields)
            return f"unknown here; Headway {_here(max(sorted(texts), key=len), verb=True)}" if agree else None
    return None


def table(system: str) -> str:
    """The rows of one system in Markdown: name there, name here, note."""
    lines = [f"| {system} | Headway | note |", "|---|---|---|"]
    for theirs, text in FOREIGN_KEYS[system].items():
        found = ours(text)
        here = ", ".join(f"`{field}`" for field in found.fields) or NOT_HERE
        lines.append(f"| `{theirs}` | {here} | {found.note} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def targets() -> set[str]:
    """Every field of ours that some name leads to."""
    return {field for system in FOREIGN_KEYS.values() for text in system.values() for field in ours(text).fields}


def unknown_targets() -> set[str]:
    """Targets that are no field of Config: none, unless a field was renamed."""
    return targets() - set(field_kinds())


def _plain(key: str) -> str:
    """One spelling for `--rollout-batch-size`, `rollout_batch_size`, `+data.seed`."""
    return key.strip().lstrip("+~-").replace("-", "_")


def _equal(theirs: str, name: str) -> bool:
    return theirs == name


def _below_another_root(theirs: str, name: str) -> bool:
    telling = "." in name or "_" in name  # `n`, `path` and `enable` stand below many roots
    return (telling and theirs.endswith(f".{name}")) or ("." in theirs and name.endswith(f".{theirs}"))


def _among_all_below(theirs: str, name: str) -> bool:
    return theirs.endswith(".*") and f".{theirs[:-1]}" in f".{name}."


def _flat(theirs: str, name: str) -> bool:
    return theirs == name.rpartition(".")[2]


def _here(text: str, *, verb: bool = False) -> str:
    found = ours(text)
    if not found.fields:
        return f"has no such setting: {found.note}" if verb else f"{NOT_HERE}: {found.note}"
    names = " and ".join(f"`{field}`" for field in found.fields)
    return ("calls it " if verb else "") + names + (f": {found.note}" if found.note else "")


_BY_PLAIN_NAME = [(system, _plain(theirs), text) for system, names in FOREIGN_KEYS.items()
                  for theirs, text in names.items()]
