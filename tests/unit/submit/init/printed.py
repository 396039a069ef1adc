"""What commands print on clusters of several kinds: a real Slurm 22.05 (../slurm_outputs), others by hand.

Those are written after the fields of the version that is named; names and numbers are made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Printed(NamedTuple):
    """The answers of one cluster's commands."""

    config: str
    partition: str
    node: str
    associations: str = ""
    default_account: str = ""


_CONFIG = """\
Configuration data as of 2026-11-22T13:00:00
AccountingStorageEnforce = {enforce}
AccountingStorageType   = {storage}
ClusterName             = {name}
JobRequeue              = 1
JobSubmitPlugins        = {plugins}
SelectType              = {select}
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = {version}
TmpFS                   = {tmp}

Slurmctld(primary) at ctl1 is UP
"""


def config(version: str, **values: str) -> str:
    usual = {
        "enforce": "associations,limits,qos,safe",
        "storage": "accounting_storage/slurmdbd",
        "name": "kepler",
        "plugins": "(null)",
        "select": "select/cons_tres",
        "tmp": "/tmp",
    }
    return _CONFIG.format(version=version, **usual | values)


_RECORDED = json.loads((Path(__file__).parents[1] / "slurm_outputs" / "cluster.json").read_text())
# Debian 12's: what the test cluster printed of its partitions and nodes.
SLURM_22_05 = Printed(
    config=config("22.05.8", enforce="none", storage="accounting_storage/none", name="hs"),
    partition=_RECORDED["partitions"]["stdout"],
    node=_RECORDED["nodes"]["stdout"],
    associations=_RECORDED["no-accounting"]["stdout"],
)


def _node_24_11(name: str, partitions: str, gres: str, state: str, features: str) -> str:
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=36 CPUAlloc=0 CPUEfctv=72 CPUTot=72 CPULoad=0.00 "
        f"AvailableFeatures={features} ActiveFeatures={features} Gres={gres} NodeAddr={name} NodeHostName={name} "
        "Version=24.11.5 OS=Linux 5.14.0-503.el9.x86_64 #1 SMP PREEMPT_DYNAMIC Wed Apr 9 RealMemory=1031000 AllocMem=0 "
        f"FreeMem=900000 Sockets=2 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
        f"Partitions={partitions} BootTime=2026-11-01T00:00:00 SlurmdStartTime=2026-11-01T00:00:00 "
        "LastBusyTime=2026-11-22T13:00:00 ResumeAfterTime=None CfgTRES=cpu=72,mem=1031000M,billing=72,gres/gpu=4 "
        "AllocTRES= Reason=new Partitions=none CPUTot=1 [root@2026-11-22]\n"
    )


_PARTITION_24_11 = (
    "AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=01:00:00 "
    "DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED OverSubscribe=NO State=UP TotalCPUs=288 "
    "TotalNodes=4 SelectTypeParameters=NONE"
)


def _partition_24_11(name: str, **changed: str) -> str:
    fields = dict(word.split("=") for word in _PARTITION_24_11.split()) | changed
    return f"PartitionName={name} " + " ".join(f"{key}={value}" for key, value in fields.items()) + "\n"


# A site with accounting: CPUs by default, whole nodes with GPUs of two types, a partition of a group, one that is down.
SLURM_24_11 = Printed(
    config=config("24.11.5", plugins="lua", tmp="/local"),
    partition=(
        _partition_24_11("cpu", Default="YES", MaxTime="UNLIMITED", TotalNodes="100")
        + _partition_24_11("boost", OverSubscribe="EXCLUSIVE", AllowQos="boost_prod,boost_dbg", MaxTime="08:00:00")
        + _partition_24_11("vip", AllowGroups="astro,root", MaxTime="UNLIMITED", TotalNodes="9")
        + _partition_24_11("old", State="DOWN", TotalNodes="50")
    ),
    node=(
        _node_24_11("c001", "cpu", "(null)", "IDLE", "icelake")
        + "".join(
            _node_24_11(f"b00{number}", "boost", "gpu:nvidia_a100-sxm4-80gb:4(S:0-1)", "IDLE", "a100,nvme")
            for number in (1, 2, 3)
        )
        + _node_24_11("b004", "boost", "gpu:nvidia_h100_80gb_hbm3:4(S:0-1)", "MIXED+PLANNED", "h100,nvme")
        + _node_24_11("b005", "boost", "gpu:2", "DOWN+DRAIN", "broken")
        + _node_24_11("v001", "vip", "gpu:h200:8", "IDLE", "h200")
        + _node_24_11("o001", "old", "gpu:v100:4", "IDLE", "v100")
    ),
    associations="astro|||normal\ngenom||boost_prod,normal|normal\nlab|boost|boost_dbg|\n",
    default_account="genom\n",
)

DF = """\
Filesystem                Type     1024-blocks        Used   Available Capacity Mounted on
nas1:/export/home         nfs4       104857600    60000000    44857600      58% /home
10.0.0.1@o2ib:/scratch    lustre 4000000000000 10000000000 3990000000000       1% /scratch
tmpfs                     tmpfs      264036984        1000   264035984       1% /tmp
"""
IP = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: eno1    inet 192.0.2.17/24 brd 192.0.2.255 scope global noprefixroute eno1\\       valid_lft forever
2: eno1    inet6 fe80::1/64 scope link \\       valid_lft forever preferred_lft forever
4: ib0    inet 10.1.0.7/16 brd 10.1.255.255 scope global ib0\\       valid_lft forever preferred_lft forever
5: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\       valid_lft forever
6: vlan7@eno1    inet 198.51.100.4/24 scope global vlan7\\       valid_lft forever
"""
QUOTA = """\
Disk quotas for user alice (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nas1:/export/home 18000000* 17000000 52428800  6days  210000       0       0
      /dev/sda1     100       0       0            12       0       0
"""
LMOD = """\
/apps/modules/Core:
apptainer/1.3.4
cuda/12.4.0
cuda/12.8.1(default)
gcc/13.2.0
/apps/modules/Libs:
fftw/3.3.10 <L>
"""
