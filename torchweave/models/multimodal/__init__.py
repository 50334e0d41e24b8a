"""Models that take images: which ones, their forward over tokens and rows of images, and their encoders."""
