"""The pipeline's components: one file each, a few lines around a function of ddpm_kube.tasks.

KFP runs the source of each function in a pod of the image, which contains ddpm_core and ddpm_kube.
So each function imports what it needs. It is short, because KFP stores it several times for each
task. Components pass on small files (ddpm_kube.artifacts) and `settings`, a reference to the
complete configuration, which `prepare` writes to the workspace (ddpm_kube.record).
"""

# `pipelines/ddpm.py compile --image --light-image` overrides the images. Components that need no
# PyTorch have the light one. `train` has the full one: it may train in its own pod, and the workers
# of its PyTorchJob get its image.
IMAGE = "ddpm:dev"
LIGHT_IMAGE = "ddpm-light:dev"
