"""From pictures of any kind to packed arrays, and the order in which training reads them."""
