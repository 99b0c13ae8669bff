// The flags about the KV cache: how much memory, what is kept of ended requests, and where.
#include "apps/fathom/flag_builders.h"

namespace fathom::app {

namespace {

// 0 is what the flag's help says.
ApplyFlag SetBytes(int64_t engine::KvTierOptions::* member, const char* flag) {
  return [=](const FlagValues& values, ServeOptions& options) -> Status {
    ASSIGN_OR_RETURN(options.model.kv.*member, ParseSize(values[0], flag, 0));
    return OkStatus();
  };
}

Status ApplyRetentionInterval(const FlagValues& values, ServeOptions& options) {
  if (values[0] == "auto") return OkStatus();
  ASSIGN_OR_RETURN(options.model.kv.retention_interval,
                   ParseSize(values[0], "prefix-cache-retention-interval", 0));
  return OkStatus();
}

}  // namespace

void AddKvFlags(std::vector<ServeFlag>* flags) {
  const ApplyFlag set_kv_bytes = [](const FlagValues& v, ServeOptions& o) -> Status {
    ASSIGN_OR_RETURN(o.model.kv_cache_bytes, ParseSize(v[0], "kv-cache-memory"));
    return OkStatus();
  };
  flags->push_back(
      Works("kv-cache-memory", "SIZE", "bytes for the KV cache (default: auto)", set_kv_bytes));
  flags->push_back(Works("kv-cache-memory-bytes", "SIZE", "the same", set_kv_bytes));
  flags->push_back(
      Works("gpu-memory-utilization", "SHARE",
            "of a GPU's memory that the server may use, 0.01 to 1 (default 0.9); on a CPU "
            "--kv-cache-memory sizes the cache",
            [](const FlagValues& v, ServeOptions& o) -> Status {
              ASSIGN_OR_RETURN(o.model.gpu_memory_utilization,
                               ParseNumber<double>(v[0], 0.01, 1.0, "gpu-memory-utilization"));
              return OkStatus();
            }));
  ServeFlag prefix_caching = Works(
      "enable-prefix-caching", "",
      "keep what requests computed and reuse common prefixes "
      "(default on)",
      [](const FlagValues& v, ServeOptions& o) -> Status {
        o.model.kv.prefix_caching = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch);
  prefix_caching.negatable = true;
  flags->push_back(std::move(prefix_caching));
  flags->push_back(Works("prefix-cache-retention-interval", "N|auto",
                         "tokens between the points of a prompt where it can be gone on from, "
                         "besides its end (default auto, 4096; 0: its end only)",
                         ApplyRetentionInterval));
  flags->push_back(Works("kv-host-size", "SIZE",
                         "pinned host memory for prefixes that the device has no room for "
                         "(default 0; 4G with a disk)",
                         SetBytes(&engine::KvTierOptions::host_bytes, "kv-host-size")));
  flags->push_back(Works("kv-disk-dir", "DIR",
                         "folder for prefixes on disk, found again after a restart; this server's "
                         "alone, mode 700; on each host (default: none)",
                         [](const FlagValues& v, ServeOptions& o) -> Status {
                           o.model.kv.disk_directory = v[0];
                           return OkStatus();
                         }));
  flags->push_back(Works("kv-disk-size", "SIZE",
                         "of what is kept there, by all ranks and hosts together (default 64G; 0: "
                         "nothing)",
                         SetBytes(&engine::KvTierOptions::disk_bytes, "kv-disk-size")));
  flags->push_back(Works(
      "kv-disk-write-bandwidth", "SIZE",
      "bytes a second written there, by all ranks and hosts together (default 200M; 0: "
      "no limit)",
      SetBytes(&engine::KvTierOptions::disk_write_bytes_per_second, "kv-disk-write-bandwidth")));
}

}  // namespace fathom::app
