"""Data sources: everything that `prepare.source` can name.

base       the interface (`Source`) and the listing of its content
open       opens the source that `prepare.source` names, and detects when it has changed
folder     a directory of this machine
archive    a zip or tar archive, read without unpacking it
unpacking  decompression with limits, for archives that may be malicious
shards     a folder of archives, as img2dataset and WebDataset write them
s3         all objects below an s3:// prefix, or an archive in S3
dvc        a path that DVC tracks in a git repository
cifar      CIFAR-10's binary files
digits     scikit-learn's handwritten digits, the default
download   the official archives of CIFAR-10 and DTD
"""
