# SPDX-License-Identifier: Apache-2.0
"""What the samples share: data, options, checkpoints behind a progress bar, ranks."""
