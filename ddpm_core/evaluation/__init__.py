"""Scores of checkpoints with their evidence, checks for copied training images, and the report.

evaluate      the verb: score every sampled checkpoint, write the files, log to MLflow
scorer        all scores of one set of images
metrics       distances between features: FID, KID, inception score, precision and recall
features      extractor interface, features of many images, pixel PCA
inception     the Inception extractor of FID; weights finds its file
in_domain     the small classifier that replaces Inception; shared gives all runs the same one
reference     features and neighbours of the real images, kept between runs
memorisation  copies of training images, and collapse (samples that repeat one another)
freshness     whether the scores are up to date
verdict       the numbers in plain words, with caveats
curves        what the charts show; plots draws them as PNG, chart lays them out as SVG
tables        results.json, CSV and metrics.json
grids         image grids of samples and nearest pairs
report        report.html; pages has what all pages share

Rows of results.json and their ranking are in ddpm_core.scores.
"""
