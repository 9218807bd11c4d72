"""From images of any kind to packed arrays, and the order in which training reads them.

prepare   `ddpm prepare`: source to data/
check     `ddpm check-data`: a report on a source
sources/  what `prepare.source` can name
layout    classes and splits from folder names
captions  a text for each image
decode    one image file to an RGB square
workers   decoding in several processes
split     which images are held out
pack      the array files in data/
contact   the contact sheet
rejected  images that cannot be used
overlap   keeps the source and the files of a run apart
names     file names of users
dataset   opens the packed arrays
order     which images each training step takes
"""
