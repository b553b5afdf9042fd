"""Files of other tools' runs, with keys of every kind, and descriptions of data sets."""

AXOLOTL = """
base_model: org/base-1b
model_type: AutoModelForCausalLM
adapter: qlora
load_in_4bit: true
load_in_8bit: false
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens]
datasets:
  - path: org/talks
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {user: [human], assistant: [gpt]}
  - {path: org/more, type: sharegpt}
val_set_size: 0.05
chat_template: llama3
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 8
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
lr_scheduler_kwargs: {min_lr: 2e-5}
learning_rate: "2e-4"
warmup_steps: 10
weight_decay: 0.01
max_grad_norm: 0.5
adam_beta2: 0.95
bf16: true
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
flash_attention: true
eval_steps: 50
saves_per_epoch: 2
early_stopping_patience: 3
logging_steps: 5
wandb_project: talks
wandb_entity:
wandb_name: first
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
deepspeed: deepspeed_configs/zero2.json
neftune_noise_alpha: 5
seed: 7
special_tokens: {pad_token: "<pad>", eos_token: "</s>"}
tokens: ["<tool>"]
dp_shard_size: 2
output_dir: ./outputs/talks
my_own_key: 3
"""

LLAMA_FACTORY = """
model_name_or_path: org/base-8b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj, v_proj
quantization_bit: 4
dataset: own, talks
template: qwen
cutoff_len: 1024
max_samples: 500
preprocessing_num_workers: 16
mask_history: true
neat_packing: true
output_dir: saves/own
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
pure_bf16: true
resume_from_checkpoint: null
val_size: 0.1
eval_strategy: steps
eval_steps: 100
label_smoothing_factor: 0.1
report_to: [tensorboard, mlflow]
"""
INFO = {
    "own": {"file_name": "own.json", "columns": {"prompt": "question", "response": "answer"}},
    "talks": {
        "hf_hub_url": "org/talks",
        "formatting": "sharegpt",
        "subset": "en",
        "columns": {"messages": "messages", "tools": "functions"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "ranked": {
        "file_name": "ranked.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "better", "rejected": "worse"},
    },
    "labelled": {
        "file_name": "labelled.json",
        "columns": {"prompt": "question", "response": "answer", "kto_tag": "good"},
    },
}

TORCHTUNE = """
output_dir: /tmp/out/3b
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /models/3b/tokenizer.model, max_seq_len: null}
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_3b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 64
  lora_alpha: 128
checkpointer:
  _component_: torchtune.training.FullModelMetaCheckpointer
  checkpoint_dir: /models/3b/original/
  checkpoint_files: [consolidated.00.pth]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
dataset:
  - {_component_: torchtune.datasets.chat_dataset, source: json, data_files: chats.json, conversation_column: talk,
     conversation_style: openai, packed: true}
  - {_component_: torchtune.datasets.instruct_dataset, source: org/pairs, split: "train[:50%]",
     column_map: {input: q, output: a}}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4, betas: [0.9, 0.95]}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 4
batch_size_val: ${batch_size}
epochs: 2
max_steps_per_epoch: 30
gradient_accumulation_steps: 2
clip_grad_norm: null
shuffle: false
seed: 1
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: own, tags: [a, b]}
dtype: bf16
enable_activation_checkpointing: true
"""

#: Runs over preferences.
AXOLOTL_DPO = """
base_model: org/base-1b
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
rl: dpo
rl_beta: 0.2
dpo_label_smoothing: 0.1
precompute_ref_log_probs: true
remove_unused_columns: false
datasets:
  - {path: org/pairs, split: train, type: chatml.intel}
  - path: org/turns
    type: chatml.argilla_chat
chat_template: chatml
sequence_len: 1024
max_prompt_len: 512
sample_packing: false
micro_batch_size: 2
num_epochs: 1
learning_rate: 5e-6
output_dir: ./outputs/pairs
"""

LLAMA_FACTORY_SIMPO = """
model_name_or_path: org/base-8b
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
lora_dropout: 0.1
pref_beta: 2.0
pref_loss: simpo
simpo_gamma: 0.7
pref_ftx: 0.0
dataset: pairs
eval_dataset: ranked
template: llama3
cutoff_len: 2048
output_dir: saves/pairs
per_device_train_batch_size: 1
learning_rate: 5.0e-6
"""

TORCHTUNE_DPO = """
output_dir: /tmp/out/8b
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /models/8b/tokenizer.model, max_seq_len: 1024}
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
  lora_alpha: 16
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/8b
  checkpoint_files: [model-00001-of-00001.safetensors]
  model_type: LLAMA3
dataset:
  _component_: torchtune.datasets.preference_dataset
  source: json
  data_files: pairs.json
  column_map: {chosen: better, rejected: worse}
optimizer: {_component_: torch.optim.AdamW, fused: true, weight_decay: 0.05, lr: 5e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05}
batch_size: 4
epochs: 1
clip_grad_norm: null
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}"}
dtype: bf16
"""


def lists(out):
    """Title of a list on the screen → its keys."""
    found = {}
    for block in out.split("\n\n")[1:-1]:
        title, *lines = block.splitlines()
        found[title.partition(" (")[0]] = (
            " ".join(line[2:].partition("  ")[0] for line in lines).replace(",", "").split()
        )
        assert all("  " in line[2:] for line in lines)
    return found
