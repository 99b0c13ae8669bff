// Two nodes in network namespaces of their own, joined by a cable that can be pulled. Skipped where
// the process may not make any.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "comm/test_nodes.h"

namespace fathom::comm {
namespace {

using std::chrono::seconds;
using testing::AnyOf;
using testing::HasSubstr;

// Hosts 0 and 1 with the addresses 10.213.7.1 and .2.
class TwoHosts {
 public:
  TwoHosts() {
    is_made_ = Ip("netns add {0}") && Ip("netns add {1}") &&
               Ip("link add {0} netns {0} type veth peer name {1} netns {1}") &&
               Ip("-n {0} addr add 10.213.7.1/24 dev {0}") &&
               Ip("-n {1} addr add 10.213.7.2/24 dev {1}") && Ip("-n {0} link set {0} up") &&
               Ip("-n {1} link set {1} up");
  }
  ~TwoHosts() {
    Ip("netns del {0}");
    Ip("netns del {1}");
  }

  bool is_made() const { return is_made_; }
  void PullTheCable() { EXPECT_TRUE(Ip("-n {1} link set {1} down")); }

  // Runs body(host) on both hosts.
  void OnBoth(const std::function<void(size_t)>& body) {
    OnThreads(2, [&](size_t host) {
      ASSERT_TRUE(Enter(host));
      body(host);
    });
  }

 private:
  bool Ip(const char* command) const {
    const std::string line = fmt::format(fmt::runtime(command), Name(0), Name(1));
    return std::system(fmt::format("ip {} >/dev/null 2>&1", line).c_str()) == 0;
  }
  static std::string Name(size_t host) { return fmt::format("fathom{}{}", getpid(), "ab"[host]); }

  // Of the calling thread and those that it starts.
  static bool Enter(size_t host) {
    const int fd = open(fmt::format("/var/run/netns/{}", Name(host)).c_str(), O_RDONLY | O_CLOEXEC);
    const bool is_entered = fd >= 0 && setns(fd, CLONE_NEWNET) == 0;
    if (fd >= 0) close(fd);
    return is_entered;
  }

  bool is_made_ = false;
};

TEST(TwoHosts, ExchangeAndNoticeAPulledCable) {
  TwoHosts hosts;
  if (!hosts.is_made()) GTEST_SKIP() << "no network namespaces here";
  auto options = OptionsFor({2, 2});
  std::vector<std::unique_ptr<NodeGroup>> groups(2);
  hosts.OnBoth([&](size_t host) {
    options[host].master_addr = "10.213.7.1";
    options[host].heartbeat_timeout = seconds(3);
    auto group = NodeGroup::Join(options[host]);
    ASSERT_TRUE(group.ok()) << group.status().message();
    groups[host] = std::move(*group);
    OnThreads(2, [&](size_t i) {
      for (int round = 0; round < 100; ++round) {
        ASSERT_TRUE(GatherOnce(groups[host]->transport(static_cast<int>(i))).ok());
      }
    });
  });
  ASSERT_TRUE(groups[0] && groups[1]);
  hosts.PullTheCable();
  for (auto& group : groups) {
    const Status status = group->control().Receive().status();
    EXPECT_EQ(status.code(), StatusCode::kPeer);
    EXPECT_THAT(status.message(), AnyOf(HasSubstr("silent"), HasSubstr("has gone")));
    EXPECT_FALSE(group->transport(0).Exchange({}, {}).ok());
  }
}

}  // namespace
}  // namespace fathom::comm
