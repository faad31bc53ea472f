"""Is a person told when a stop would take longer than the batch system's notice?"""

from __future__ import annotations

from rpipe.training.notice import Notice


def test_iteration_and_checkpoint_must_fit_into_the_notice():
    notice = Notice(notice_s=60.0)
    notice.published(100.0)
    notice.published(150.0)
    assert notice.saved(200.0, 209.0) == ""  # 50 + 9
    told = notice.saved(300.0, 320.0)
    assert "a stop may take 70.0 s (iteration 50.0, checkpoint 20.0)" in told
    assert "60 s of notice; wanted: sbatch --signal=B:USR2@88 and limits.notice_s=88" in told


def test_it_is_told_again_only_when_it_got_worse():
    notice = Notice(notice_s=10.0)
    assert notice.saved(0.0, 20.0)
    assert notice.saved(30.0, 51.0) == ""
    assert notice.saved(60.0, 90.0)


def test_without_a_batch_system_nothing_is_told():
    assert Notice(notice_s=None).saved(0.0, 1e6) == ""
