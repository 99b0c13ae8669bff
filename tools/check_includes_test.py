"""Each rule of check_includes.py is broken once in a small tree, and nothing else is reported."""

import tempfile
import unittest
from pathlib import Path

from check_includes import check_tree

HEADER = "// A contract.\n#pragma once\n"


class CheckIncludes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def errors(self, **files: str) -> list[str]:
        """Checks a tree of files named like src__base__a_h."""
        for name, text in files.items():
            stem, _, suffix = name.replace("__", "/").rpartition("_")
            path = self.root / f"{stem}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return check_tree(self.root)

    def assert_one(self, errors: list[str], *words: str):
        self.assertEqual(len(errors), 1, errors)
        for word in words:
            self.assertIn(word, errors[0])

    def test_a_lower_layer_and_the_own_folder_are_allowed(self):
        self.assertEqual(self.errors(
            src__base__a_h=HEADER, src__model__b_h=HEADER,
            src__model__b_cc='#include "model/b.h"\n#include "base/a.h"\n'), [])

    def test_a_higher_layer_is_refused(self):
        self.assert_one(self.errors(src__base__a_cc='#include "model/b.h"\n'), "layer 0", "layer 4")

    def test_folders_of_one_layer_do_not_include_each_other(self):
        self.assert_one(self.errors(src__kernels__a_cc='#include "kv_cache/b.h"\n'), "kv_cache")

    def test_runtime_does_not_include_the_scheduler(self):
        self.assert_one(self.errors(src__runtime__a_cc='#include "scheduler/b.h"\n'), "scheduler")

    def test_no_json_below_the_api(self):
        for folder in ("scheduler", "kv_cache", "kernels", "model", "runtime", "engine"):
            with self.subTest(folder):
                path = self.root / "src" / folder / "a.cc"
                path.parent.mkdir(parents=True)
                path.write_text('#include "json/json.h"\n')
                self.assert_one(check_tree(self.root), folder, "json")
                path.unlink()

    def test_an_include_is_relative_to_src(self):
        self.assert_one(self.errors(src__base__a_cc='#include "status.h"\n'), "relative to src/")

    def test_a_folder_without_a_layer_is_refused(self):
        self.assert_one(self.errors(src__helpers__a_cc="\n"), "has no layer")

    def test_apps_include_any_folder_but_no_folder_includes_apps(self):
        self.assertEqual(self.errors(apps__fathom__main_cc='#include "api/a.h"\n'), [])
        self.assert_one(self.errors(src__api__a_cc='#include "apps/fathom/b.h"\n'), "apps")

    def test_a_library_has_one_home(self):
        self.assert_one(self.errors(src__http__a_cc="#include <boost/json/src.hpp>\n"), "json only")

    def test_a_library_header_does_not_travel_to_another_folder(self):
        errors = self.errors(
            src__http__inner_h=HEADER + "#include <boost/asio/post.hpp>\n",
            src__http__server_h=HEADER + '#include "http/inner.h"\n',
            src__http__server_cc='#include "http/server.h"\n',
            src__api__a_cc='#include "http/server.h"\n')
        self.assert_one(errors, "src/api/a.cc", "boost/asio/post.hpp", "http/inner.h")

    def test_fmt_core_is_public_through_the_log_only(self):
        log = HEADER + "#include <fmt/core.h>\n"
        use = '#include "base/log.h"\n'
        self.assertEqual(self.errors(src__base__log_h=log, src__http__a_cc=use), [])
        self.assert_one(self.errors(src__base__b_h=log, src__http__a_cc='#include "base/b.h"\n'),
                        "fmt/core.h")

    def test_a_header_begins_with_its_contract_and_pragma_once(self):
        self.assert_one(self.errors(src__base__a_h="#pragma once\n"), "contract")
        self.assert_one(self.errors(src__base__a_h="// A contract.\n"), "#pragma once")

    def test_the_environment_is_read_in_apps_only(self):
        self.assertEqual(self.errors(apps__fathom__a_cc='std::getenv("HOME");\n'), [])
        self.assert_one(self.errors(src__base__a_cc='std::getenv("HOME");\n'), "environment")

    def test_the_scheduler_takes_the_time_from_base(self):
        self.assert_one(self.errors(src__scheduler__a_cc="std::chrono::steady_clock::now();\n"),
                        "base/clock.h")

    def test_files_are_short(self):
        self.assertEqual(self.errors(src__base__a_cc="\n" * 800), [])
        self.assert_one(self.errors(src__base__a_cc="\n" * 801), "801 lines")
        self.errors(src__base__a_cc="\n")
        self.assertEqual(self.errors(src__kernels__a_cuh=HEADER + "\n" * 1498), [])
        self.assert_one(self.errors(src__kernels__a_cuh=HEADER + "\n" * 1499), "1501 lines")


if __name__ == "__main__":
    unittest.main()
