"""The pipeline's components: one file each, a few lines around a function of the library.

KFP runs the source of each function in a pod of the image, which contains ddpm_core and ddpm_kube.
So each function imports what it needs. Components pass on small files (ddpm_kube.artifacts) and
`settings`, the complete configuration as text, which `prepare` writes.
"""

# The image of every component; `pipelines/ddpm.py compile --image` overrides it.
IMAGE = "ddpm:dev"
