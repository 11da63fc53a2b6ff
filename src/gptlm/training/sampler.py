"""Which samples a replica reads: consecutive ones, the order lies in the dataset's index."""

from collections.abc import Iterator

from torch.utils.data import Sampler


class ConsecutiveBatches(Sampler[list[int]]):
    """Batch b of replica r is samples start + (b x replicas + r) x batch_size and the next batch_size - 1.

    So all replicas together read start, start + 1, ... whatever their number, as PaddleNLP's DistributedBatchSampler
    does, and resuming is a matter of `start`.

    Args:
        start: first sample, the number of samples consumed so far.
        batches: batches per replica over the whole run; those before `start` count in `len` but are not read.
        done: batches of this replica that earlier starts of the run have read.
    """

    def __init__(self, *, start: int, batch_size: int, batches: int, replica: int, replicas: int, done: int = 0):
        self.start, self.batch_size, self.batches = start, batch_size, batches
        self.replica, self.replicas, self.done = replica, replicas, done

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.batches - self.done):
            first = self.start + (batch * self.replicas + self.replica) * self.batch_size
            yield list(range(first, first + self.batch_size))
