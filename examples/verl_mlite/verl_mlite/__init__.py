"""`model_engine=mlite` for verl 0.9.1: Megatron Lite's trainer as an engine of verl's own PPO and SFT trainers."""
