"""The pipeline's components: a file each, a few lines around a function of the library.

KFP takes the source of each function and runs it in a pod of the image, where ddpm_core and
ddpm_kube are installed; so a function imports what it needs by itself. What it hands on are small
files (ddpm_kube.artifacts) and `settings`, the whole configuration as text, which prepare makes.
"""

# The image of every component, here alone; `pipelines/ddpm.py compile --image` sets another one.
IMAGE = "ddpm:dev"
