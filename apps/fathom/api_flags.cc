// The rows of the flag table about the API: where it listens, who may ask, what one request may
// ask for, and how long anything may be silent.
#include <fmt/format.h>

#include <chrono>
#include <sstream>
#include <utility>

#include "apps/fathom/flag_builders.h"
#include "apps/fathom/model_session.h"

namespace fathom::app {
namespace {

using Values = FlagValues;

// One key a line; blank lines and lines that begin with '#' are skipped.
Status AddKeysOfFile(const std::string& path, std::vector<std::string>* keys) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  std::istringstream lines(text);
  const size_t before = keys->size();
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos || line[begin] == '#') continue;
    keys->push_back(line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin));
  }
  if (keys->size() > before) return OkStatus();
  return InvalidArgument(fmt::format("--api-key-file {}: no key in it; write one a line", path));
}

void AddKeyFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(Works(
      "api-key", "KEY…", "keys that requests must bring (default: none needed)",
      [](const Values& v, ServeOptions& o) -> Status {
        RETURN_IF_ERROR(CheckNotEmpty(v, "api-key"));
        o.api_keys.insert(o.api_keys.end(), v.begin(), v.end());
        return OkStatus();
      },
      FlagKind::kList));
  flags->push_back(
      Works("api-key-file", "FILE", "more keys, one a line; # begins a comment",
            [](const Values& v, ServeOptions& o) { return AddKeysOfFile(v[0], &o.api_keys); }));
}

void AddListenFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(Works("host", "ADDRESS",
                         "address to listen on (default 127.0.0.1; 0.0.0.0 for all)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           RETURN_IF_ERROR(CheckNotEmpty(v, "host"));
                           o.host = v[0];
                           return OkStatus();
                         }));
  flags->push_back(Works("port", "PORT", "port to listen on (default 8000; 0 picks a free one)",
                         SetNumber(&ServeOptions::port, 0, 65535, "port")));
  flags->push_back(Works(
      "metrics-port", "PORT", "/metrics here, on 127.0.0.1 and without keys (default: on --port)",
      [](const Values& v, ServeOptions& o) -> Status {
        ASSIGN_OR_RETURN(o.metrics_port, ParseNumber<int>(v[0], 0, 65535, "metrics-port"));
        return OkStatus();
      }));
  flags->push_back(Works("io-threads", "N", "threads that read, parse and write (default 2)",
                         SetNumber(&ServeOptions::num_io_threads, 1, 256, "io-threads")));
  flags->push_back(Works(
      "served-model-name", "NAME…", "names the API answers to (default: as given)",
      [](const Values& v, ServeOptions& o) -> Status {
        RETURN_IF_ERROR(CheckNotEmpty(v, "served-model-name"));
        o.served_model_names = v;
        return OkStatus();
      },
      FlagKind::kList));
}

// A member of the request limits, from 1 (or `low`) up.
ServeFlag RequestLimit(const char* name, int api::RequestLimits::* member, int low,
                       std::string help) {
  return Works(name, "N", std::move(help), [=](const Values& v, ServeOptions& o) -> Status {
    ASSIGN_OR_RETURN(o.limits.*member, ParseNumber<int>(v[0], low, 1 << 24, name));
    return OkStatus();
  });
}

ApplyFlag SetSize(int64_t ServeOptions::* member, const char* name) {
  return [=](const Values& v, ServeOptions& o) -> Status {
    ASSIGN_OR_RETURN(o.*member, ParseSize(v[0], name));
    return OkStatus();
  };
}

ServeFlag HttpSize(const char* name, int64_t http::Limits::* member, std::string help) {
  return Works(name, "SIZE", std::move(help), [=](const Values& v, ServeOptions& o) -> Status {
    ASSIGN_OR_RETURN(o.http_limits.*member, ParseSize(v[0], name));
    return OkStatus();
  });
}

ServeFlag HttpTime(const char* name, std::chrono::milliseconds http::Limits::* member,
                   std::string help) {
  return Works(name, "SECONDS", std::move(help), [=](const Values& v, ServeOptions& o) -> Status {
    ASSIGN_OR_RETURN(const int seconds, ParseNumber<int>(v[0], 1, 86400, name));
    o.http_limits.*member = std::chrono::seconds(seconds);
    return OkStatus();
  });
}

void AddHttpLimits(std::vector<ServeFlag>* flags) {
  using http::Limits;
  flags->push_back(HttpSize("max-body-bytes", &Limits::max_body_bytes,
                            "largest request body; more is a 413 (default 64M)"));
  flags->push_back(HttpSize("max-header-bytes", &Limits::max_header_bytes,
                            "request line and headers together (default 32k)"));
  flags->push_back(Works("max-header-fields", "N", "headers of one request (default 100)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           ASSIGN_OR_RETURN(
                               o.http_limits.max_header_fields,
                               ParseNumber<int>(v[0], 1, 100'000, "max-header-fields"));
                           return OkStatus();
                         }));
  flags->push_back(HttpTime("header-timeout", &Limits::header_timeout,
                            "from a request's first byte to the end of its headers (default 10)"));
  flags->push_back(HttpTime("body-timeout", &Limits::body_grace,
                            "then a body must come at --min-body-rate (default 10)"));
  flags->push_back(HttpSize("min-body-rate", &Limits::min_body_bytes_per_second,
                            "bytes a second of a request body (default 1k)"));
  flags->push_back(HttpTime("idle-timeout", &Limits::idle_timeout,
                            "a connection without a request is closed (default 75)"));
  flags->push_back(
      HttpSize("max-write-buffer-bytes", &Limits::max_write_buffer_bytes,
               "of an answer that its client does not read; more ends it (default 1M)"));
  flags->push_back(HttpTime("write-timeout", &Limits::write_stall_timeout,
                            "a client that reads nothing for so long is gone (default 30)"));
}

void AddRequestLimits(std::vector<ServeFlag>* flags) {
  using api::RequestLimits;
  flags->push_back(RequestLimit("max-logprobs", &RequestLimits::max_logprobs, 0,
                                "most top log-probabilities a request may ask for (default 20)"));
  flags->push_back(RequestLimit("max-messages", &RequestLimits::max_messages, 1,
                                "messages of one request (default 10000)"));
  flags->push_back(RequestLimit("max-tools", &RequestLimits::max_tools, 1,
                                "tools of one request (default 128)"));
  flags->push_back(RequestLimit("max-sequences", &RequestLimits::max_sequences, 1,
                                "prompts times n of one request (default 64)"));
  flags->push_back(RequestLimit("max-logit-bias", &RequestLimits::max_logit_bias, 0,
                                "entries of logit_bias (default 1024)"));
  flags->push_back(RequestLimit("max-stop-strings", &RequestLimits::max_stop_strings, 0,
                                "stop strings of one request (default 16)"));
  flags->push_back(RequestLimit("max-stop-string-bytes", &RequestLimits::max_stop_string_bytes, 1,
                                "of a stop string or a bad word (default 256)"));
  flags->push_back(RequestLimit("max-bad-words", &RequestLimits::max_bad_words, 0,
                                "bad_words of one request (default 256)"));
  flags->push_back(Works("max-json-depth", "N", "nesting of a request body (default 128)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           ASSIGN_OR_RETURN(o.limits.json.max_depth,
                                            ParseNumber<int>(v[0], 2, 1000, "max-json-depth"));
                           return OkStatus();
                         }));
  flags->push_back(Works("max-json-nodes", "SIZE", "values in a request body (default 50000000)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           ASSIGN_OR_RETURN(o.limits.json.max_nodes,
                                            ParseSize(v[0], "max-json-nodes"));
                           return OkStatus();
                         }));
  flags->push_back(Works("replay-bytes", "SIZE",
                         "answers kept as they were sampled, so that a conversation goes on token "
                         "by token (default 64M)",
                         SetSize(&ServeOptions::replay_bytes, "replay-bytes")));
  flags->push_back(Works("response-store-bytes", "SIZE",
                         "responses kept for previous_response_id (default 256M)",
                         SetSize(&ServeOptions::response_store_bytes, "response-store-bytes")));
  flags->push_back(Works("max-queue", "N", "requests that may wait; more get 429 (default 1024)",
                         SetNumber(&ServeOptions::max_queue, 1, 1 << 20, "max-queue")));
}

ServeFlag Permission(const char* name, bool ServeOptions::* member, std::string help) {
  return Works(
      name, "", std::move(help),
      [=](const Values& v, ServeOptions& o) {
        o.*member = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch);
}

void AddPermissions(std::vector<ServeFlag>* flags) {
  flags->push_back(Permission(
      "enable-return-routed-experts", &ServeOptions::allow_routed_experts,
      "requests may ask for the experts of each token, return_routed_experts (default off: up to "
      "1 KB a token)"));
  flags->push_back(Works("scheduling-policy", "fcfs|priority",
                         "whether requests may say their priority, lower first (default fcfs: "
                         "arrival and fair shares alone)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           RETURN_IF_ERROR(OneOf("scheduling-policy", {"fcfs", "priority"})(v, o));
                           o.allow_priority = v[0] == "priority";
                           return OkStatus();
                         }));
  flags->push_back(Permission("enable-cache-reset", &ServeOptions::allow_cache_reset,
                              "POST /reset_prefix_cache forgets all kept prefixes (default off)"));
  flags->push_back(Permission("isolate-tenants", &ServeOptions::isolate_keys,
                              "prefixes are shared between requests of one API key only, as if "
                              "each key had a cache_salt (default off)"));
}

void AddLifeFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(Works("drain-timeout", "SECONDS",
                         "after SIGTERM, how long running requests may finish (default 30)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           ASSIGN_OR_RETURN(const int s,
                                            ParseNumber<int>(v[0], 0, 86400, "drain-timeout"));
                           o.drain_timeout_s = s;
                           return OkStatus();
                         }));
  flags->push_back(
      Works("keep-alive-interval", "SECONDS",
            "a sign of life on an answer that is silent for so long (default 10)",
            SetNumber(&ServeOptions::keep_alive_interval_s, 1, 3600, "keep-alive-interval")));
  flags->push_back(
      Works("resume-window", "SECONDS",
            "how long a stream that asked for it can be resumed (default 15; 0: never)",
            SetNumber(&ServeOptions::resume_window_s, 0, 3600, "resume-window")));
  flags->push_back(Works("log-level", "LEVEL", "debug, info, warning or error (default info)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           RETURN_IF_ERROR(
                               OneOf("log-level", {"debug", "info", "warning", "error"})(v, o));
                           o.log_level = v[0];
                           return OkStatus();
                         }));
}

}  // namespace

void AddApiFlags(std::vector<ServeFlag>* flags) {
  AddListenFlags(flags);
  AddKeyFlags(flags);
  AddHttpLimits(flags);
  AddRequestLimits(flags);
  AddPermissions(flags);
  AddLifeFlags(flags);
}

}  // namespace fathom::app
