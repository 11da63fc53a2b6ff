"""Launcher flags of PaddlePaddle, OneFlow and torchrun: renamed, without effect, or refused."""

from gptlm.compat.paddlenlp import STATIC

LAUNCH_RENAMED = {
    "gpus": "devices",
    "selected_gpus": "devices",
    "selected_devices": "devices",
    "num_gpus_per_node": "nproc_per_node",
    "num_nodes": "nnodes",
    "node_ips": "ips",
    "ctrl_port": "port",
    "start_port": "port",
    "node_rank": "rank",
    "master_addr": "master",
    "master_port": "port",
}
# OneFlow's training script is its own launcher: these may also stand among the script's flags.
LAUNCH_WORDS_OF_SCRIPTS = ("num_gpus_per_node", "num_nodes", "node_ips", "ctrl_port")
LAUNCH_WORDS_OF_PRETRAIN = (*LAUNCH_WORDS_OF_SCRIPTS, "rank", "node_rank")  # a rank means other things elsewhere
RESTARTS = "a failed rank ends the run; the same command resumes from the newest checkpoint"
LAUNCH_IGNORED = {
    "max_restart": RESTARTS,
    "elastic_timeout": RESTARTS,
    "log_level": "the launcher prints what it starts and what failed",
    "enable_gpu_log": "monitor the GPUs with nvidia-smi",
    "legacy": "there is one launcher",
    "with_gloo": "processes without a GPU always use gloo",
    "backend": "processes use NCCL on GPUs and gloo without",
    "sort_ip": "the node order is the order of ips, or is assigned at rendezvous",
    "use_fast_launch": "there is one launcher",
    "auto_parallel_config": STATIC,
    "enable_auto_mapping": STATIC,
    "cluster_topo_path": STATIC,
    "rank_mapping_path": STATIC,
}
CARDS = "gptlm runs on NVIDIA GPUs and CPUs; name GPUs with --gpus"
SERVERS = "parameter servers are not used; give --gpus and --nnodes"
LAUNCH_REFUSED = {
    "xpus": (("",), CARDS),
    "npus": (("",), CARDS),
    "mlus": (("",), CARDS),
    "elastic_level": (("", "-1", "0"), f"the number of nodes is fixed: {RESTARTS}"),
    "run_mode": (("", "collective"), f"the one mode is collective; {SERVERS}"),
    "servers": (("",), SERVERS),
    "trainers": (("",), SERVERS),
    "workers": (("",), SERVERS),
    "heter_workers": (("",), SERVERS),
    "server_num": (("", "0"), SERVERS),
    "trainer_num": (("", "0"), SERVERS),
    "worker_num": (("", "0"), SERVERS),
    "heter_worker_num": (("", "0"), SERVERS),
    "auto_tuner_json": (("",), "give pretraining --auto_parallel, or the script its parallel degrees"),
}
