"""Instance hooks: methods of single modules that put ops where transformers' interfaces do not reach."""
