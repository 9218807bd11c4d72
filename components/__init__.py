"""The pipeline's components: one file each, a few lines around a function of ddpm_kube.tasks.

KFP runs the source of each function in a pod of the image, which contains ddpm_core and ddpm_kube.
So each function imports what it needs. It is short, because KFP stores it several times for each
task. Components pass on small files (ddpm_kube.artifacts) and `settings`, a reference to the
complete configuration, which `prepare` writes to the workspace (ddpm_kube.record).
"""

# The image of every component; `pipelines/ddpm.py compile --image` overrides it.
IMAGE = "ddpm:dev"
