"""Small reference models, pretrained with and without attention sinks on purpose: `bench pretrain CONFIG`."""
