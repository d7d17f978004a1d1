"""The networks: diffusion transformer, text encoder and VAE. They know no file and no command line."""
