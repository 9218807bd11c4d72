"""How good a checkpoint is: scores with their evidence, copies of training images, the report.

metrics         distances between two sets of features, and their names
statistics      features of many images, streamed
extractors      what turns images into features; inception, in_domain, pixel_pca are the members
frozen, shared  the in-domain extractor on disk and in MLflow: one per data fingerprint
reference       the training set's side of every score, kept between runs
collapse        near duplicates among samples, against those among real images
memorisation    nearest training images of samples, against those of held-out images
scorer           all scores of one set of images
evaluate        the verb: every sampled checkpoint, its row, the files
rows            rows of results.json, which of them compare, the best, the CSV files
plots, report   what a person looks at
told            what MLflow is told of it
"""
