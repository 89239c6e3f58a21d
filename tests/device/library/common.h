// What all parts share: the lock, what is reported to Python, waits of the host, and the texts of a vendor's runtime.
#pragma once
#include <ATen/ATen.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

// The device type, and the dispatch key, of which this device is.
#ifdef SIM_XPU
#define SIMULATED_KEY XPU
#else
#define SIMULATED_KEY CUDA
#endif

namespace sim {
using at::Tensor;
constexpr c10::DeviceType kType = c10::DeviceType::SIMULATED_KEY;
constexpr c10::DispatchKey kKey = c10::DispatchKey::SIMULATED_KEY;
constexpr int kDevices = 8;
inline int num_devices = 2;
inline thread_local int current_device = 0;

// ---- what Python sets -----------------------------------------------------------------------------------------------
#ifdef SIM_XPU
inline std::string runtime = "XPU";
#else
inline std::string runtime = "HIP";      // how errors begin: "HIP error", "CUDA error"
#endif
inline bool sync_is_error = false;       // each wait of the host is an error
inline int sync_debug_mode = 0;          // torch.cuda.set_sync_debug_mode: 1 warns, 2 raises
inline bool problem_is_error = false;    // each problem is raised where it is noticed
inline std::string problem_file;         // and a line of this file, whose name ends with the number of the process
inline bool has_float64 = true;          // Intel's Arc A has none
inline bool fused_attention = true;      // this GPU has flash and memory-efficient kernels
inline std::string faulty_operator;      // its results are multiplied
inline double faulty_factor = 1.0;
inline std::string breaking_operator;    // its kernel touches memory that is not its own
inline int64_t breaks_after = 0;         // calls of it that are right
inline bool breaking_kills = false;      // the runtime ends the process, as AMD's does for most such faults
inline void (*hear_wait)(const char*) = nullptr;          // Python looks where the host waits
inline const char* (*hear_launch)(const char*) = nullptr;  // Python says where an operator was called, while tracing

// ---- the lock -------------------------------------------------------------------------------------------------------
// One for everything. Python must not be called while it is held: a tensor that Python frees needs the lock while that
// thread holds Python's own. So waits are told when the outermost holder lets go.
inline std::recursive_mutex mutex;
inline thread_local int depth = 0;
inline thread_local std::vector<std::string> waits_to_tell;
struct Locked {
  Locked() { mutex.lock(), depth++; }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() {
    bool outermost = --depth == 0;
    mutex.unlock();
    if (!outermost || waits_to_tell.empty()) return;
    auto told = std::move(waits_to_tell);
    waits_to_tell.clear();
    if (hear_wait)
      for (auto& what : told) hear_wait(what.c_str());
  }
};

// ---- what is reported -----------------------------------------------------------------------------------------------
inline std::map<std::string, int64_t> calls, waits, missing, problems;

inline void problem(const std::string& text) {
  if (problems.size() < 1000 || problems.count(text)) problems[text]++;
  if (problems[text] == 1 && !problem_file.empty())  // written at once: a process may end without a word
    if (FILE* file = std::fopen((problem_file + "." + std::to_string(getpid())).c_str(), "a")) {
      std::fprintf(file, "%s\n", text.c_str());
      std::fclose(file);
    }
  TORCH_CHECK(!problem_is_error, text);
}

// The host waits for a device. `asked`: by a function whose name says so, for which PyTorch's own mode has no word.
inline void note_wait(const std::string& what, bool asked = false) {
  waits[what]++;
  waits_to_tell.push_back(what);
  TORCH_CHECK(!sync_is_error, "the host waits for the device: ", what);
  if (asked) return;
  TORCH_CHECK(sync_debug_mode < 2, "called a synchronizing CUDA operation");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

// ---- errors of the runtime ------------------------------------------------------------------------------------------
// As PyTorch writes them for each vendor (c10/cuda/CUDAException.cpp, and what hipify makes of it).
[[noreturn]] inline void raise_runtime_error(int code, const std::string& text, const std::string& name) {
  bool hip = runtime == "HIP";
  std::ostringstream out;
  out << runtime << " error: " << text << "\nSearch for `" << (hip ? "hip" : "cuda") << name << "' in "
      << (hip ? "https://rocm.docs.amd.com/projects/HIP/en/latest/index.html"
              : "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html")
      << " for more information.\n"
      << runtime << " kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
      << "might be incorrect.\nFor debugging consider passing "
      << (hip ? "AMD_SERIALIZE_KERNEL=3" : "CUDA_LAUNCH_BLOCKING=1") << "\nCompile with `TORCH_USE_"
      << (hip ? "HIP" : "CUDA") << "_DSA` to enable device-side assertions.\n";
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code, out.str());
}

inline std::string format_size(size_t bytes) {  // as c10::CachingAllocator::format_size
  std::ostringstream out;
  out.precision(2);
  out << std::fixed;
  if (bytes <= 1024)
    out << bytes << " bytes";
  else if (bytes <= 1048576)
    out << static_cast<double>(bytes) / 1024 << " KiB";
  else if (bytes <= 1073741824ull)
    out << static_cast<double>(bytes) / 1048576 << " MiB";
  else
    out << static_cast<double>(bytes) / 1073741824 << " GiB";
  return out.str();
}
}  // namespace sim
