"""Empty: optimum-habana imports torchvision for models that are not Llama, without declaring it."""
