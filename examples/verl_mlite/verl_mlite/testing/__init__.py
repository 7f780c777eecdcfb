"""For tests only, and inert until one of its modules is named. What verl needs to train on a machine without a GPU:

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_mlite.testing.platform_cpu,verl_mlite.testing.rollout
and actor_rollout_ref.rollout.name=embedded
"""
