"""Data sources: everything that `prepare.source` can name.

base       the interface (`Source`) and the listing of its content
open       opens the source that `prepare.source` names, and detects when it has changed
folder     a directory of this machine
file       one file with many images, recognised by its content:
archive    a zip or tar archive, read without unpacking it
parquet    a parquet file, as Hugging Face stores data sets
arrays     a .npy or .npz file
shards     a folder of such files, as WebDataset and Hugging Face write them
sidecars   classes and captions in columns, and in .json files beside images
limits     what such files have in common: identity, limits, errors
unpacking  decompression with limits, for archives that may be malicious
pages      the sizes of the pages in a parquet file
s3         all objects below an s3:// prefix, or one file in S3
dvc        a path that DVC tracks in a git repository
cifar      CIFAR-10's binary files
digits     scikit-learn's handwritten digits, the default
download   the official archives of CIFAR-10 and DTD
"""
