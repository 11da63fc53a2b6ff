from gptlm.training.sampler import ConsecutiveBatches


def batches(**change):
    settings = {"start": 0, "batch_size": 2, "batches": 3, "replica": 0, "replicas": 1, **change}
    return list(ConsecutiveBatches(**settings))


def test_replicas_read_neighbouring_slices():
    """PaddleNLP's DistributedBatchSampler: the global batch is consecutive, rank r has slice r of it."""
    assert batches() == [[0, 1], [2, 3], [4, 5]]
    assert batches(replicas=2) == [[0, 1], [4, 5], [8, 9]]
    assert batches(replicas=2, replica=1) == [[2, 3], [6, 7], [10, 11]]


def test_going_on_reads_what_would_have_come_and_keeps_the_length():
    whole = batches(replicas=2, replica=1, batches=5)
    sampler = ConsecutiveBatches(start=8, batch_size=2, batches=5, replica=1, replicas=2, done=2)
    assert list(sampler) == whole[2:] and len(sampler) == 5
