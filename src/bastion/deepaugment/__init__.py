"""DeepAugment (Hendrycks et al. 2021): copies of images by image-to-image networks with distorted weights."""
