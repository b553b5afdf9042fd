"""How a decoder is executed: rematerialisation, loops, chunks, memories, meshes; and the model as one value."""
