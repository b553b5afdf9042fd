"""Speed and accuracy of attention on this device, by every available implementation, and its block sizes."""
