"""A script as in TRL's documentation."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

MODEL = "Qwen/Qwen2-0.5B-Instruct"
EPSILON = 0.2


def reward_num_unique_letters(completions, **kwargs):
  """Rewards completions with more unique letters."""
  contents = [completion[0]["content"] for completion in completions]
  return [float(len(set(content))) for content in contents]


def main():
  dataset = load_dataset("trl-lib/tldr", split="train")
  training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO",
    epsilon=EPSILON,
    num_train_epochs=1,
    steps_per_generation=4,
    gradient_accumulation_steps=2,
    learning_rate=float(open("rate").read()),
  )
  trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[reward_num_unique_letters, think_format_reward],
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(
      r=8, lora_alpha=32, target_modules=["q_proj", "o_proj"]
    ),
  )
  trainer.train()


if __name__ == "__main__":
  main()
