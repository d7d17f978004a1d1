"""The networks: diffusion transformer, text encoder and VAE. They read no files and know no command line."""
