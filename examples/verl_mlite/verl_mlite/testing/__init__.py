"""What verl needs to train on a machine without a GPU: a platform, and Megatron Lite's embedded engine as a rollout. For tests only:

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_mlite.testing, and actor_rollout_ref.rollout.name=embedded
"""

from verl_mlite.testing import platform_cpu, rollout  # noqa: F401 - both register themselves
