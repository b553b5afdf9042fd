"""One run as Axolotl, LLaMA-Factory and torchtune have it, which trains alike in each."""

#: A run of two steps by each tool's file, all of them the same train step; {model}, {data} and {output} are places.
RUNS = {
    "axolotl": """
base_model: {model}
adapter: qlora
load_in_4bit: true
lora_r: 4
lora_alpha: 16
lora_target_linear: true
datasets:
  - {{path: {data}, ds_type: json, type: chat_template}}
dataset_prepared_path:
val_set_size: 0
sequence_len: 64
sample_packing: true
pad_to_sequence_len: true
gradient_accumulation_steps: 1
micro_batch_size: 2
max_steps: 2
optimizer: adamw_torch
lr_scheduler: constant
learning_rate: 1e-2
float32: true
gradient_checkpointing: true
flash_attention: true
logging_steps: 1
saves_per_epoch: 1
output_dir: {output}
""",
    "llama-factory": """
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
lora_rank: 4
lora_alpha: 16
lora_target: all
dataset: talks
dataset_dir: {info}
template: default
cutoff_len: 64
packing: true
overwrite_cache: true
preprocessing_num_workers: 16
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 1.0e-2
lr_scheduler_type: constant
max_steps: 2
logging_steps: 1
save_strategy: epoch
plot_loss: true
output_dir: {output}
""",
    "torchtune": """
output_dir: {output}
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, path: {model}/tokenizer.model, max_seq_len: 64}}
model:
  _component_: torchtune.models.llama3_2.qlora_llama3_2_1b
  lora_attn_modules: [q_proj, k_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 4
  lora_alpha: 16
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {model}
  checkpoint_files: [model.safetensors]
  output_dir: ${{output_dir}}
  model_type: LLAMA3
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: {data}
  conversation_column: messages
  conversation_style: openai
  packed: true
seed: 3407
batch_size: 2
optimizer: {{_component_: torch.optim.AdamW, fused: true, lr: 1e-2, weight_decay: 0}}
loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
epochs: 1
max_steps_per_epoch: 2
gradient_accumulation_steps: 1
clip_grad_norm: 1.0
log_every_n_steps: 1
device: cuda
dtype: fp32
compile: false
""",
}
