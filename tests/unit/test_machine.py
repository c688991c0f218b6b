"""What Linux tells of the processor and of a GPU's driver, and nothing where it does not."""

from autokernel.machine import cpu_name, gpu_driver


def test_the_drivers_version_is_that_of_its_kernel_module(tmp_path):
    assert gpu_driver(tmp_path) is None
    (tmp_path / "nvidia").mkdir()
    assert gpu_driver(tmp_path) is None
    (tmp_path / "nvidia" / "version").write_text("580.95.05\n")
    assert gpu_driver(tmp_path) == "nvidia 580.95.05"


def test_the_processors_name_is_the_first_that_is_told(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_name(cpuinfo) is None
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert cpu_name(cpuinfo) is None
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Example CPU @ 2 GHz\nmodel name\t: other\n")
    assert cpu_name(cpuinfo) == "Example CPU @ 2 GHz"
